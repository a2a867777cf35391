"""Each rank publishes its share. If a rank dies, a version is whole or not there, and any number goes on."""

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_weight_sync import Publisher, codec
from delta_weight_sync.checkout import follow
from delta_weight_sync.checkpoint import INDEX, map_folder, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import ConfigError, PeerError, ProtocolError
from delta_weight_sync.publish import mirror, outbox, shortcuts
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import RunLogReader, SyncEvent, TrafficEvent
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store._files import FileBucket
from delta_weight_sync.vllm.disk import Layout
from tests import forked

SHAPES = {f"layers.{n}.weight": (64, 48 + n % 3) for n in range(12)} | {"norm.weight": (7,), "none": (0, 3)}


def weights(step: int) -> dict[str, torch.Tensor]:
    """The weights after a number of steps, each of which moves one weight in twenty."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for number in range(step):
        generator.manual_seed(number + 1)
        for weight in found.values():
            moves = torch.rand(weight.shape, generator=generator) < 0.05
            weight += moves * 0.01 * torch.randn(weight.shape, generator=generator)
    return found


def digest(step: int) -> str:
    return to_hex(state_digest({name: to_bits(weight) for name, weight in weights(step).items()}))


def url_of(folder: Path) -> str:
    """Of the bucket: a folder, unless a file names another one."""
    named = folder / "url"
    return named.read_text() if named.exists() else (folder / "bucket").as_uri()


def reader_of(folder: Path) -> RunReader:
    return RunReader(open_bucket(url_of(folder)), "run")


def start(work: Callable[..., None], size: int, folder: Path, *arguments: object) -> list[int | None]:
    """As `forked.ranks`, with a base in the folder."""
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text("{}")
    return forked.ranks(work, size, folder, *arguments)


def publisher(folder: Path, **options: Any) -> Publisher:
    return Publisher(f"{url_of(folder)}#run", folder / "base", **options)


# Counted.


def count(rank: int, folder: Path) -> None:
    """Publish three versions; note what this rank diffs, keeps, encodes and uploads of weights."""
    diffed = [0]
    encoded = [0]
    sent = [0]
    add = mirror.Search.add
    encode = codec.encode
    put = FileBucket._put

    def counted_add(self: mirror.Search, part: mirror.Part) -> None:
        diffed[0] += part.tensor.numel()
        add(self, part)

    def counted_encode(patches: list[codec.Patch], *arguments: Any, **options: Any) -> bytes:
        encoded[0] += sum(patch.index.size for patch in patches)
        return encode(patches, *arguments, **options)

    def counted_put(self: FileBucket, key: str, data: bytes | Path) -> None:
        if key.endswith(".safetensors"):
            sent[0] += data.stat().st_size if isinstance(data, Path) else len(data)
        put(self, key, data)

    mirror.Search.add = counted_add  # type: ignore[method-assign]
    codec.encode = counted_encode
    FileBucket._put = counted_put  # type: ignore[method-assign]
    with publisher(folder) as publishing:
        for step in range(3):
            publishing.publish(weights(step).items(), step)
            publishing.flush()
        kept = publishing._outbox.mirror
        assert not publishing._outbox._shards.mirror.shapes, "every rank holds the model whole"
        held = sum(kept.bits(name).size for name in kept.shapes)
    (folder / f"counts-{rank}").write_text(f"{diffed[0]} {held} {encoded[0]} {sent[0]}")


@pytest.mark.full
def test_work_memory_and_uploads_of_a_rank_fall_with_the_number_of_ranks(tmp_path):
    """Each is its share, give or take a tenth; and the versions are those of one process."""
    for size in (1, 2, 4):
        folder = tmp_path / f"{size}"
        assert start(count, size, folder) == [0] * size
        counts = [[*map(int, (folder / f"counts-{r}").read_text().split())] for r in range(size)]
        if size == 1:
            whole = counts[0]
        assert [sum(column) for column in zip(*counts, strict=True)][:3] == whole[:3]
        for own in counts:
            assert own == pytest.approx([number / size for number in whole], rel=0.1)
        manifests = [*reader_of(folder).versions()][::-1]
        assert [m.digest for m in manifests] == [digest(step) for step in range(3)]
        assert [len(m.delta) for m in manifests[1:]] == [size] * 2
        assert len(manifests[0].anchor.weights) == size
        assert any(ref.name == INDEX for ref in manifests[0].anchor.files) == (size > 1)
        events = [*RunLogReader(reader_of(folder).bucket, "run").poll()]
        first = next(event for event in events if isinstance(event, SyncEvent))
        sent = next(event for event in events if isinstance(event, TrafficEvent)).sent
        assert sent["anchors"] >= first.anchor_bytes > 2 * sum(map(math.prod, SHAPES.values())), (
            "of all ranks"
        )


# Killed.


def dies_after(kind: Any, name: str) -> None:
    """This process dies when it has called a method."""
    method = getattr(kind, name)

    def dying(*arguments: Any, **options: Any) -> None:
        method(*arguments, **options)
        os._exit(9)

    setattr(kind, name, dying)


def dies_after_storing(part: str) -> None:
    """This process dies when it has stored an object whose key holds `part`."""
    put = FileBucket._put

    def dying(self: FileBucket, key: str, data: bytes | Path) -> None:
        put(self, key, data)
        if part in key:
            os._exit(9)

    FileBucket._put = dying  # type: ignore[method-assign]


FAULTS = {
    "diff": partial(dies_after, mirror.Search, "found"),
    "all_to_all": partial(dies_after, outbox.Peers, "all_to_all"),
    "digest": partial(dies_after, outbox.RepeatedSyncs, "holds_back"),
    "encode": partial(dies_after, codec, "encode"),
    "delta": partial(dies_after_storing, "/deltas/"),
    "manifest": partial(dies_after_storing, "/manifests/"),
    "head": partial(dies_after_storing, "/heads/"),
    "jump": partial(dies_after_storing, "/jumps/"),
    "anchor": partial(dies_after_storing, "/anchors/"),
    "collect": partial(dies_after, RunWriter, "collect"),
}


def live(rank: int, folder: Path, begin: int, fault: str, victim: int) -> None:
    """Publish ten versions. From the third on, the victim may die; then the others must raise `PeerError`."""
    shortcuts.STRIDES = (4, 8)  # type: ignore[assignment]
    RunWriter.anchor_is_due = lambda self: self.newest.version % 3 == 0 and not self.ordered
    outbox._FILE_BYTES = 20_000
    try:
        with publisher(folder) as publishing:
            for step in range(begin, begin + 10):
                if step == begin + 2 and rank == victim:
                    FAULTS[fault]()
                publishing.publish(weights(step).items(), step)
                publishing.flush()
                publishing._outbox.shortcuts.idle(60)
    except PeerError:
        return
    assert not fault, "a rank has died, and nobody noticed"


def begin_again(rank: int, folder: Path) -> None:
    """Start from the base; every rank must raise the same."""
    with (
        pytest.raises(ConfigError, match="starts with the weights of version 0"),
        publisher(folder) as starting,
    ):
        starting.publish(weights(0).items())


@pytest.mark.full
def test_every_rank_refuses_to_begin_again_with_the_base(tmp_path):
    assert start(live, 3, tmp_path, 0, "", -1) == [0] * 3
    newest = reader_of(tmp_path).newest()
    for size in (2, 1):
        assert start(begin_again, size, tmp_path) == [0] * size
    assert reader_of(tmp_path).newest() == newest


ONLY_MAIN = {"manifest", "head", "collect"}
KILLED = [(fault, victim) for fault in FAULTS for victim in (0, 1) if not (victim and fault in ONLY_MAIN)]


@pytest.mark.long
def test_a_rank_that_dies_at_any_moment_leaves_a_whole_version_and_others_go_on(tmp_path):
    """Lives of two, three and one process follow one another in one run, which stays whole to the end."""
    assert start(live, 3, tmp_path, 0, "", -1) == [0] * 3
    for number, (fault, victim) in enumerate(KILLED, 1):
        begin = 10 * number
        size = 2 + number % 2
        codes = start(live, size, tmp_path, begin, fault, victim)
        assert codes == [9 if rank == victim else 0 for rank in range(size)], fault
        newest = reader_of(tmp_path).newest()
        assert newest.digest == digest(newest.sync), fault
        most = begin + (9 if fault in ("jump", "anchor") else 2)
        assert begin + 1 <= newest.sync <= most, "what was flushed is there"
    assert start(live, 1, tmp_path, begin + 10, "", -1) == [0]
    reader = reader_of(tmp_path)
    manifests = [*reader.versions()][::-1]
    assert [m.version for m in manifests] == list(range(len(manifests)))
    for manifest in manifests:
        reader.checkout(manifest, tmp_path / f"out-{manifest.version}")
        assert manifest.digest == digest(manifest.sync)
    assert {len(m.delta) for m in manifests} == {0, 1, 2, 3}
    assert {len([j for j in m.jumps if j.version == 8]) for m in manifests[9:20]} == {6}, (
        "of 4 and 8 versions"
    )
    assert max(len(m.anchor.weights) for m in manifests) > 3, "more files than ranks"


@pytest.mark.full
@pytest.mark.parametrize("empty_url", ["s3", "hf"], indirect=True)
def test_several_ranks_publish_to_other_stores_too(bucket_url, tmp_path):
    (tmp_path / "url").write_text(bucket_url)
    assert start(live, 2, tmp_path, 0, "", -1) == [0] * 2
    newest = reader_of(tmp_path).newest()
    assert (newest.sync, newest.digest, len(newest.delta)) == (9, digest(9), 2)
    state = reader_of(tmp_path).checkout(newest, tmp_path / "out")
    assert to_hex(state_digest(state)) == newest.digest


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    folder = tmp_path_factory.mktemp("two")
    assert start(live, 2, folder, 0, "", -1) == [0] * 2
    return reader_of(folder)


@pytest.mark.full
def test_followers_take_versions_of_several_ranks(run_of_two, tmp_path):
    """From the anchor and from each held version, by a merge of parts and versions; a replica's join too."""
    newest = run_of_two.newest()
    layout = Layout(run_of_two, tmp_path)
    for version in (2, newest.version):
        folder, shapes, _ = layout.put(run_of_two.manifest(version))
        assert to_hex(state_digest(map_folder(folder))) == digest(version)
    assert shapes == {name: list(shape) for name, shape in SHAPES.items()}
    with follow(run_of_two.bucket.url, tmp_path / "followed") as versions:
        seen = next(versions)
    assert seen.digest == newest.digest == to_hex(state_digest(map_folder(seen.path)))
    for held in range(newest.version):
        state = {name: to_bits(weight) for name, weight in weights(held).items()}
        paths = run_of_two.fetch_all(run_of_two.recipe(newest, held).deltas, tmp_path)
        shapes = {name: bits.shape for name, bits in state.items()}
        for decoded in codec.merged([codec.Delta(path) for path in paths], shapes, state.__getitem__):
            for patch in decoded.patches(shapes):
                codec.apply(patch, state[patch.name])
        assert to_hex(state_digest(state)) == newest.digest, held


@pytest.mark.full
def test_a_damaged_local_copy_of_a_part_is_fetched_again(run_of_two, tmp_path):
    reader = reader_of(Path(run_of_two.bucket.url.removeprefix("file://")).parent)
    parts = reader.newest().delta
    damaged, *_ = reader.fetch_all(parts, tmp_path)
    published = damaged.read_bytes()
    damaged.write_bytes(bytes(len(published)))
    again, *_ = reader.fetch_all(parts, tmp_path)
    assert again.read_bytes() == published
    assert not reader._unreadable


@pytest.mark.full
def test_a_part_that_is_damaged_makes_its_whole_version_unreadable(run_of_two, tmp_path):
    """An older version is read instead; a part alone is never applied."""
    copy = tmp_path / "bucket"
    shutil.copytree(Path(run_of_two.bucket.url.removeprefix("file://")), copy)
    reader = RunReader(open_bucket(copy.as_uri()), "run")
    newest = reader.newest()
    (copy / newest.delta[1].key).write_bytes(b"torn")
    with pytest.raises(ProtocolError, match="are not the published objects"):
        reader.checkout(newest, tmp_path / "out")
    assert newest.delta[0].key in reader._unreadable
    older = reader.readable(newest)
    assert older.version == newest.version - 1
    assert to_hex(state_digest(reader.checkout(older, tmp_path / "out"))) == older.digest
