"""Reading a run of a real bucket: damage is read around or refused by name, and the next trainer goes on."""

import contextlib
import itertools
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from delta_weight_sync import watch
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.errors import BucketError, FencedError
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import MAX_PARTS, AnchorRef, Manifest
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import SMALL, open_bucket
from delta_weight_sync.watch import Watcher
from tests import forked
from tests.chaos.faulty import Fault, Faulty
from tests.cli.command import command
from tests.fuzz import forged
from tests.support.held import held
from tests.support.real_run import Drifting, is_built
from tests.support.waiting import PATIENCE_S

RUN = "test"


def write(folder: Path, versions: int, run: str = RUN) -> None:
    drifting = Drifting(folder, run=run)
    for _ in range(1, versions):
        drifting.step()
    drifting.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run of four versions; the folder that is its bucket."""
    write(tmp_path / "bucket", 4)
    return tmp_path / "bucket"


def reader_of(folder: Path) -> RunReader:
    return RunReader(open_bucket(folder.as_uri()), RUN)


def head_in(folder: Path) -> Path:
    (path,) = (folder / "runs/test/heads").iterdir()
    return path


def foreign(head: Path) -> None:
    """The HEAD of another run: it names a manifest that is not ours."""
    folder = head.parents[3]
    write(folder, 2, run="other")
    (other,) = (folder / "runs/other/heads").iterdir()
    shutil.copy(other, head)
    shutil.rmtree(folder / "runs/other")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn": lambda head: head.write_bytes(head.read_bytes()[:60]),
    "empty": lambda head: head.write_bytes(b""),
    "flipped": lambda head: head.write_bytes(head.read_bytes().replace(b'"version":3', b'"version":2')),
    "foreign": foreign,
    "missing": Path.unlink,
}


@pytest.mark.parametrize(("poked", "at_once"), [(False, 3), (True, 4)])
def test_all_of_the_next_version_is_read_at_once(tmp_path: Path, poked: bool, at_once: int) -> None:
    """HEAD, manifest and delta. After a poke, the look whether HEAD changed does not come first, either."""
    run = Drifting(tmp_path, run=RUN)
    reader = reader_of(tmp_path)
    watcher = Watcher(reader, poll_s=0.0)
    seen = list[Manifest]()
    together = threading.Barrier(at_once)
    assert watcher.check(seen.append)
    run.step()
    reader.bucket.url = "hub"  # a folder would be read without threads
    for name in ("get", "stat")[: 1 + poked]:
        real = getattr(reader.bucket, name)
        setattr(reader.bucket, name, lambda key, real=real: together.wait(60.0) + 1 and real(key))
    if poked:
        watcher.poke()
    assert watcher.check(seen.append)
    assert [each.version for each in seen] == [0, 1]
    run.close()


@pytest.mark.finding("M6")
def test_little_is_fetched_ahead_however_many_parts_a_delta_has(tmp_path: Path) -> None:
    """Else each poke would cost as many requests as a forged manifest names parts."""
    run = Drifting(tmp_path, run=RUN)
    run.step()
    reader = reader_of(tmp_path)
    watcher = Watcher(reader, poll_s=0.0)
    newest = watcher.poll()
    assert newest is not None
    (delta,) = newest.delta
    parts = [delta.model_copy(update={"key": delta.key.replace(".safe", f".r{n}.safe")}) for n in range(1000)]
    watcher._newest = newest.model_copy(update={"deltas": tuple(parts)})
    reader.bucket.url = "hub"  # nothing is read ahead from a folder
    asked = list[str]()
    reader.bucket.get = lambda key, *_: asked.append(key) or b""  # type: ignore[method-assign,func-returns-value]
    watcher._fetch_ahead(newest.version + 1000)
    reader._pool.shutdown()
    assert 1 < len(asked) <= MAX_PARTS + 1
    run.close()


def test_a_head_that_was_read_before_a_listing_is_not_taken_for_the_listed_one(tmp_path: Path) -> None:
    run = Drifting(tmp_path, run=RUN)
    reader = reader_of(tmp_path)
    watcher = Watcher(reader, poll_s=0.0)
    seen = list[Manifest]()
    assert watcher.check(seen.append)
    reader.bucket.url = "hub"  # nothing is read ahead from a folder
    run.step()
    for _ in range(2):  # the second poke brings no news: the HEAD that was read ahead is left
        watcher.poke()
        watcher.check(seen.append)
    run.step()
    watcher.reset()
    assert watcher.check(seen.append)
    assert [each.version for each in seen] == [0, 1, 2], "else the newest one counts as used, and is missed"
    run.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_read_around_and_the_next_trainer_mends_it(written: Path, damage: str) -> None:
    digest = reader_of(written).manifest().digest
    DAMAGES[damage](head_in(written))
    newest = Watcher(reader_of(written)).poll()
    assert newest is not None
    assert (newest.version, newest.digest) == (3, digest)
    writer = RunWriter(open_bucket(written.as_uri()), RUN, model="m", assets=None)
    assert writer.newest is not None
    assert writer.newest.version == 3
    assert writer.newest == reader_of(written).manifest(), "and HEAD is whole again"
    reader_of(written).require_intact()
    is_built(reader_of(written), 3, written.parent / "out")


@pytest.mark.parametrize("kind", ["manifests", "deltas"])
def test_a_version_with_a_file_missing_is_not_whole(written: Path, kind: str) -> None:
    (file,) = (written / "runs/test" / kind).glob("00000003.*")
    file.unlink()
    head_in(written).unlink()
    newest = reader_of(written).newest()
    assert newest is not None
    assert newest.version == 2


def test_a_manifest_that_head_never_named_is_what_the_next_trainer_goes_on_from(written: Path) -> None:
    """The trainer died between the two; whoever reads around a damaged HEAD serves that version already."""
    writer = RunWriter(open_bucket(written.as_uri()), RUN, model="m", assets=None)
    claim = head_in(written).read_bytes()
    decided = writer.commit(
        [writer.put_delta(4, b"delta", 1)],
        None,
        digest="0" * 16,
        sync=5,
        total=1,
        full_bytes=2,
        created_at=0.0,
    )
    head_in(written).write_bytes(claim)
    rolled = RunWriter(open_bucket(written.as_uri()), RUN, model="m", assets=None)
    assert rolled.newest == decided


def test_a_flipped_byte_in_any_object_is_refused_by_name(written):
    files = [path for path in written.rglob("*") if path.is_file() and "/log/" not in str(path)]
    objects = [path for path in files if path.name not in ("run.json", "README.md")]
    assert len(objects) >= 9
    for path in objects:
        original = path.read_bytes()
        path.write_bytes(bytes([*original[:-9], original[-9] ^ 1, *original[-8:]]))
        result = command("verify", written.as_uri())
        path.write_bytes(original)
        assert result.code == 1, path
        assert path.name in result.complaint, f"{path.name} is not named: {result.complaint}"
        assert len(result.complaint.splitlines()) == 1
    assert command("verify", written.as_uri()).code == 0


# Objects of a run's first version: a claim, weights, config.json, run.json, README.md, manifest, HEAD.
BASE = 7
HEADS = (4, 7)  # a later trainer takes over with a HEAD of its own; then come delta, manifest and HEAD


def publish_until_killed(url: str, assets: Path, last: int) -> None:
    """Publish version after version, and die when object number `last` is stored."""
    bucket = Faulty(open_bucket(url, create=True))
    bucket.arm(Fault("kill after", last, 1, ("put",)))
    writer = RunWriter(bucket, RUN, model="policy", assets=assets)
    outbox = Outbox(writer, RunLogWriter(bucket, RUN, writer.writer))
    weights = {"embed.weight": torch.ones(600, 100), "norm.weight": torch.ones(64)}
    for sync in itertools.count(1):
        weights["embed.weight"][0] = torch.randn(100)  # few changes: no anchor is due in this test
        outbox.publish(held(weights.items()), sync)
        outbox.flush()


def killed(url: str, assets: Path, last: int) -> None:
    trainer = forked.start(publish_until_killed, url, assets, last)
    trainer.join(300)
    assert trainer.exitcode == -signal.SIGKILL


@pytest.mark.full
def test_a_trainer_killed_while_it_uploads_leaves_the_last_version_usable(tmp_path):
    """-9 after each object: HEAD can be rebuilt, the next trainer goes on. A folder shows no half object."""
    url = (tmp_path / "bucket").as_uri()
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    early = (tmp_path / "early").as_uri()
    killed(early, assets, BASE - 1)
    assert RunReader(open_bucket(early), RUN).newest() is None
    killed(url, assets, BASE)
    reader = RunReader(open_bucket(url), RUN)
    # the second: its manifest is whole, and HEAD did not move any more
    newest = 0
    decided = 0
    for last in range(1, max(HEADS) + 1):
        killed(url, assets, last)
        newest += decided + sum(last >= head for head in HEADS)
        decided = sum(last == head - 1 for head in HEADS)
        assert reader.manifest().version == newest, f"object {last}"
        result = command("verify", url)
        assert result.code == 0, result.complaint


SCHEDULES = 150


class Turns:
    """Threads go one store operation at a time, in an order that is drawn from a seed."""

    def __init__(self, seed: int, threads: int) -> None:
        self._random = random.Random(seed)
        self._running = threads
        self._waiting: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def wait(self, thread: int) -> None:
        with self._lock:
            turn = self._waiting[thread] = threading.Event()
            self._next()
        assert turn.wait(PATIENCE_S)

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            self._next()

    def _next(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            self._waiting.pop(self._random.choice(sorted(self._waiting))).set()


class InTurns:
    """A bucket whose every operation waits for its turn."""

    def __init__(self, bucket: Any, wait: Callable[[], None]) -> None:
        self._bucket = bucket
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        if not callable(found):
            return found

        def operation(*args: Any) -> Any:
            self._wait()
            return found(*args)

        return operation


def test_a_checkout_fetches_all_deltas_together_and_after_a_failure_no_anchor_again(
    written, tmp_path, monkeypatch
):
    reader = reader_of(written)
    tried = threading.Event()
    plain = RunReader._fetch
    manifest = reader.manifest()
    together = threading.Barrier(len(manifest.deltas), action=lambda: tried.set() or 1 / 0)

    def fetch(reader, ref, folder):
        if ref in manifest.deltas and not tried.is_set():
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(PATIENCE_S)
        return plain(reader, ref, folder)

    monkeypatch.setattr(RunReader, "_fetch", fetch)
    with pytest.raises(ZeroDivisionError):
        reader.checkout(manifest, tmp_path / "out")
    monkeypatch.setattr(reader.bucket, "fetch", mock.Mock(wraps=reader.bucket.fetch))
    reader.checkout(manifest, tmp_path / "out")
    assert {call.args[0] for call in reader.bucket.fetch.mock_calls} == {ref.key for ref in manifest.deltas}


def test_a_checkout_replaces_weights_that_are_divided_into_other_files(tmp_path):
    """As with --force, and as `verify` does: a loader would take what is left of the other checkpoint."""
    folder = tmp_path / "out"
    names = []
    for number, files in enumerate((forged.intact_run(), forged.intact_parts(), forged.intact_run())):
        reader = RunReader(open_bucket(forged.write_files(files, tmp_path / f"{number}")), forged.RUN)
        state = reader.checkout(reader.manifest(), folder)
        assert dict(read_bits(folder)).keys() == state.keys()
        names.append(sorted(path.name for path in folder.glob("*.safetensors*")))
    one = ["model.safetensors"]
    parts = [f"model-{part:05d}-of-00002.safetensors" for part in (1, 2)]
    assert names == [one, [*parts, "model.safetensors.index.json"], one]


def publish(bucket: Any, run: str, weights: Path, versions: int) -> list[Manifest]:
    """The versions that a trainer published until it was done or was replaced. As in the outbox, what the
    store did not take is put again (both may write run.json at once)."""
    published: list[Manifest] = []
    with contextlib.suppress(FencedError):
        writer = RunWriter(bucket, run, model="m", assets=None)
        for _ in range(versions):
            version = writer.newest.version + 1 if writer.newest else 0
            digest = f"{random.getrandbits(64):016x}"
            delta = [writer.put_delta(version, str(writer.writer).encode(), 1)] if version else []
            files = () if version else writer.put_weights(version, [weights])
            anchor = AnchorRef(version=version, files=files) if files else None
            try:
                made = writer.commit(
                    delta, anchor, digest=digest, sync=version, total=10, full_bytes=20, created_at=0.0
                )
            except BucketError:
                made = writer.confirm()
            published.append(made)
    return published


def check(bucket: Any, run: str, published: list[list[Manifest]], versions: int) -> None:
    line = {manifest.version: manifest.digest for manifest in RunReader(bucket, run).versions()}
    told = [(manifest.version, manifest.digest) for by_one in published for manifest in by_one]
    assert len({version for version, _ in told}) == len(told), f"two owners: {told}"
    assert set(told) <= line.items(), f"lost: {sorted(set(told) - line.items())}"
    assert max(map(len, published)) == versions, "the last one owns the run until it is done"


@pytest.mark.full
def test_whatever_the_order_of_their_requests(tmp_path: Path) -> None:
    """New runs, and runs that have versions; two and three trainers."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    for seed in range(SCHEDULES):
        run = f"run{seed}"
        trainers = 2 + seed % 2
        if seed % 4 > 1:
            publish(bucket, run, weights, 2)
        turns = Turns(seed, trainers)

        def train(thread: int, run: str = run, turns: Turns = turns) -> list[Manifest]:
            try:
                return publish(InTurns(bucket, lambda: turns.wait(thread)), run, weights, 3)
            finally:
                turns.end()

        with ThreadPoolExecutor(trainers) as pool:
            check(bucket, run, list(pool.map(train, range(trainers))), 3)


class ReadBeforeItsEtag:
    """A remote bucket. `after_head`, if set, is called once a HEAD was read, before anybody reads an etag."""

    url = "s3://a/remote"

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket
        self.after_head: Callable[[], object] | None = None
        self.heads = 0  # how often a HEAD was read
        self.over = threading.Event()
        self.over.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def get(self, key: str, limit: int = SMALL) -> bytes:
        data = self._bucket.get(key, limit)
        self.heads += "/heads/" in key
        if "/heads/" in key and (call := self.after_head):
            self.after_head = None
            call()
            self.over.set()
        return data

    def stat(self, key: str) -> Any:
        assert self.over.wait(PATIENCE_S)
        return self._bucket.stat(key)


def test_a_version_that_comes_between_head_and_its_etag_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SAFETY_S", 0.05)
    drifting = Drifting(tmp_path / "bucket", run=RUN)
    bucket: Any = ReadBeforeItsEtag(drifting.reader.bucket)
    watcher = Watcher(RunReader(bucket, RUN), poll_s=0.01)
    seen: list[int] = []

    def look() -> None:
        watcher.check(lambda manifest: seen.append(manifest.version))

    drifting.step()
    look()
    drifting.step()
    bucket.after_head = drifting.step
    bucket.over.clear()
    watcher.poke()
    look()
    assert seen == [1, 2], "the etag is already that of version 3"
    deadline = time.monotonic() + PATIENCE_S
    while seen[-1] < 3 and time.monotonic() < deadline:
        look()
    assert seen == [1, 2, 3]
    read = bucket.heads
    for _ in range(20):
        time.sleep(0.01)
        look()
    assert bucket.heads == read, "it is read once more, not at each look"
    watcher.close()
    drifting.close()
