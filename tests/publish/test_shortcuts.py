"""Jumps over several versions and anchors: made beside the publisher, named by a later version, exact."""

import errno
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from delta_weight_sync import codec, records, scratch
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import BucketUnreachableError
from delta_weight_sync.prune import Keep, Pruner
from delta_weight_sync.publish import shortcuts
from delta_weight_sync.publish.writer import RunWriter, Stored
from delta_weight_sync.records import DeltaRef
from delta_weight_sync.store import open_bucket
from tests.support.real_run import RUN, TENSORS, Drifting, SlowLink, is_built
from tests.support.records import manifest_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So much of it drifts that an anchor would be due every few versions: here none is."""
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda _: False)
    with closing(Drifting(tmp_path / "bucket")) as run:
        yield run


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(open_bucket(f"file://{tmp_path}", create=True), "r", model="m", assets=None)


def spans(refs: tuple[DeltaRef, ...]) -> list[tuple[int, int]]:
    return [(ref.base, ref.version) for ref in refs]


def test_a_joiner_takes_few_files_and_every_version_is_exact(run, tmp_path):
    run.steps(75)
    way = run.newest.recipe()
    assert spans(way.deltas) == [(0, 64), (64, 72), (72, 73), (73, 74), (74, 75)]
    assert spans(run.newest.recipe(70).deltas) == [(v, v + 1) for v in range(70, 75)]
    assert spans(run.newest.recipe(16).deltas)[:7] == [(v, v + 8) for v in range(16, 72, 8)]
    for version in (0, 7, 8, 9, 63, 64, 65, 75):
        is_built(run.reader, version, tmp_path)
    naive = sum(delta.size for m in run.reader.versions() for delta in m.deltas[-1:])
    assert sum(delta.size for delta in way.deltas) < naive


BUDGETS = {"in memory": (1 << 24, 3), "in files after some versions": (3000, 10**9), "in files": (0, 10**9)}


def set_budget(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    """Where patches wait for their jump."""
    smallest, share = BUDGETS[budget]
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._SMALLEST", smallest)
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._SHARE", share)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("dtype", "encoding", "drift"),
    [(torch.float32, "fast", 1e-5), (torch.bfloat16, "small", 1e-5), (torch.bfloat16, "fast", 0.3)],
)
@pytest.mark.full
def test_a_jump_is_the_difference_of_two_checkpoints(tmp_path, monkeypatch, dtype, encoding, drift, budget):
    """Byte for byte, where weights change and change back, and after a resume. With the largest drift, a
    delta holds the new bits of every weight, so the delta cannot be read without the old ones."""
    set_budget(monkeypatch, budget)
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts.STRIDES", (4, 16))
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda _: False)
    for life in range(2):
        run = Drifting(tmp_path / "bucket", seed=life, encoding=encoding, drift=drift)
        run.weights = {name: weight.to(dtype) for name, weight in run.weights.items()}
        before = {name: weight.clone() for name, weight in run.weights.items()}
        for number in range(18):
            run.step()
            if number % 3 == 1:  # back to the weights of the start, except for a few
                for name, weight in run.weights.items():
                    weight.view(-1)[number:].copy_(before[name].view(-1)[number:])
            run.settle()
        run.close()
    jumps = run.newest.jumps
    assert {(0, 4), (12, 16), (0, 16), (18, 20), (32, 36), (18, 32)} <= {*spans(jumps)}
    for jump in jumps:
        old, new = (
            run.reader.checkout(run.reader.manifest(version), tmp_path / f"{version}")
            for version in (jump.base, jump.version)
        )
        patches = [codec.diff(name, old[name], new[name]) for name in TENSORS]
        of = {"base": jump.base, "version": jump.version, "encoding": encoding}
        path = run.reader.fetch(jump, tmp_path)
        assert codec.Delta(path).reads_old or (encoding, drift) == ("fast", 1e-5)
        assert path.read_bytes() == codec.encode(patches, old.__getitem__, **of)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_disk_has_only_small_files_until_the_longest_jump_is_made(run, monkeypatch, budget):
    set_budget(monkeypatch, budget)
    folder = run.outbox.shortcuts.folder
    run.steps(63)
    kept = [*folder.iterdir()]
    assert len(kept) == {"in memory": 7, "in files": 14}.get(budget, len(kept))
    deltas = sum(delta.size for delta in run.newest.deltas)
    assert 0 < sum(path.stat().st_size for path in kept) < deltas / 2, "no weights"
    run.steps(1)
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_jumps_and_anchors_are_exact_though_the_mirror_is_ahead(
    tmp_path, monkeypatch, request, encoding, budget
):
    """Versions were published, and a sync waits, before they are made."""
    set_budget(monkeypatch, budget)
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: self.newest.version == 9)
    with closing(Drifting(tmp_path / "bucket", encoding=encoding)) as run:
        jumps = SlowLink(run.reader.bucket, "/jumps/")
        request.addfinalizer(jumps.up.set)
        for _ in range(17):
            run.step()
        jumps.wait()
        deltas = SlowLink(run.reader.bucket, "/deltas/")
        request.addfinalizer(deltas.up.set)
        for _ in range(2):  # the second sync waits for the first
            run.move()
            run.publish()
            deltas.wait()
        jumps.up.set()
        run.settle()
        deltas.up.set()
        run.flush()
        newest = run.step()
        assert (newest.anchor.version, spans(newest.jumps)) == (9, [(0, 8), (8, 16)])
        jump = next(jump for jump in newest.jumps if jump.version == 16)
        state = run.reader.checkout(run.reader.manifest(8), tmp_path / "8")
        run.reader.apply(state, [jump], tmp_path)
        assert to_hex(state_digest(state)) == run.reader.manifest(16).digest
        assert newest.recipe().anchor == newest.anchor
        is_built(run.reader, newest.version, tmp_path)


def test_where_a_manifest_is_damaged_nothing_is_deleted_and_jumps_go_on(tmp_path, caplog):
    with closing(Drifting(tmp_path / "bucket", keep=Keep.parse("1h"))) as run:
        run.steps(3)
        (manifest,) = (run.folder / f"runs/{RUN}/manifests").glob("00000002.*")
        manifest.write_bytes(b"torn")
        run.steps(10)
        assert run.newest.jumps
        assert len(list(manifest.parent.iterdir())) == 14
        assert "deleted nothing of the run, because a manifest is damaged: " in caplog.text
        assert manifest.name in caplog.text


@pytest.mark.parametrize("part", ["/jumps/", "/anchors/"])
def test_versions_are_published_while_a_shortcut_is_uploaded(run, monkeypatch, request, part):
    link = SlowLink(run.reader.bucket, part)
    request.addfinalizer(link.up.set)  # before the run is closed, whatever fails
    run.steps(7)
    monkeypatch.setattr(
        RunWriter, "anchor_is_due", lambda self: "anchors" in part and not (self.ordered or self._new_anchor)
    )
    run.step()
    link.wait()
    for _ in range(3):
        run.step()
    assert run.newest.version == 11, "nothing waits for it"
    link.up.set()
    run.settle()
    newest = run.step()
    assert (0, 8) in spans(newest.jumps)
    assert (newest.anchor.version >= 8) == ("anchors" in part)


def test_a_jump_that_was_not_uploaded_is_made_with_the_next_version(run, tmp_path, monkeypatch, caplog):
    bucket = run.reader.bucket
    put = bucket.put

    def failing(key: str, data: bytes | Path) -> None:
        if "/jumps/" in key:
            raise BucketUnreachableError("the link is down")
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "put", failing)
        run.steps(9)
    run.steps(2)
    assert spans(run.newest.jumps) == [(0, 8)]
    assert [r.getMessage() for r in caplog.records].count(
        "no jumps and anchors for now: the link is down"
    ) == 1
    is_built(run.reader, 11, tmp_path)


def test_a_store_that_refuses_deletions_costs_no_jumps(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shortcuts, "Pruner", partial(Pruner, grace_s=0.0))
    with closing(Drifting(tmp_path / "bucket", keep=Keep(size=1))) as run:
        monkeypatch.setattr(run.reader.bucket, "_delete", mock.Mock(side_effect=PermissionError(13, "no")))
        run.steps(17)
        assert len(run.reader.bucket.list(f"{run.reader.keys.folder}jumps/")) == 2
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in said] == ["old versions were not deleted for now"]


def test_a_store_that_does_not_answer_a_look_for_damage_costs_no_jumps(run, monkeypatch, caplog):
    down = mock.Mock(side_effect=BucketUnreachableError("the link is down"))
    monkeypatch.setattr(run.reader.bucket, "stat_all", down)
    run.steps(18)
    assert (8, 16) in spans(run.newest.jumps)
    said = {record.getMessage() for record in caplog.records}
    assert said == {"the newest version was not checked for damage: the link is down"}


def test_a_full_disk_costs_jumps_and_nothing_else(run, tmp_path, monkeypatch, caplog):
    set_budget(monkeypatch, "in files")
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError("No space left on device"))
        patch.setattr("delta_weight_sync.publish.shortcuts.write", full)
        run.steps(8)
    assert "no jumps and anchors for now: No space left on device" in caplog.text
    run.steps(9)
    assert spans(run.newest.jumps) == [(8, 16)]
    is_built(run.reader, 17, tmp_path)


def test_an_anchor_does_not_fill_the_disk(run, monkeypatch, caplog):
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: not (self.ordered or self._new_anchor))
    with monkeypatch.context() as patch:
        usage = mock.Mock(return_value=mock.Mock(free=2 * 15_263))  # the model has 15,264 weights
        patch.setattr("delta_weight_sync.publish.shortcuts.shutil.disk_usage", usage)
        run.steps(3)
    assert "no jumps and anchors for now: [Errno 28] No space left on device" in caplog.text
    assert run.newest.anchor.version == 0
    run.steps(2)
    assert run.newest.anchor.version == 4
    assert [*run.outbox.shortcuts.folder.iterdir()] == []


def test_an_anchor_is_named_though_what_comes_after_its_upload_fails(run, monkeypatch):
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: not (self.ordered or self._new_anchor))
    monkeypatch.setattr(RunWriter, "look_for_damage", mock.Mock(side_effect=BucketUnreachableError("down")))
    run.steps(2)
    assert run.newest.anchor.version == 1


def test_a_file_that_somebody_wrote_into_makes_no_jump(run, monkeypatch, caplog):
    set_budget(monkeypatch, "in files")
    run.steps(7)
    files = sorted(run.outbox.shortcuts.folder.iterdir())
    files[3].write_bytes(files[4].read_bytes())
    run.steps(2)
    assert "version 8 has digest" in caplog.text
    assert run.newest.jumps == ()
    run.steps(8)
    assert spans(run.newest.jumps) == [(8, 16)]


@pytest.mark.parametrize(("version", "due"), [(500, False), (9000, True)])
def test_an_anchor_comes_before_a_manifest_names_too_many_deltas(writer, version, due):
    """A join takes few of them, but those since an anchor between two jumps are all named."""
    newest = manifest_of(version, 3)
    jump = newest.deltas[0].model_copy(update={"base": 3, "version": version})
    writer.newest = newest.model_copy(update={"jumps": (jump,), "full_bytes": 1000})
    assert writer.anchor_is_due() == due


def test_an_anchor_stays_ordered_until_all_ranks_have_tried_to_store_it(writer):
    """A jump to its version may be stored first; without this, each version would order another anchor."""
    writer.ordered = 8
    for stored in ([[Stored(0, 8, ())], [Stored(0, 8, ())]], [[Stored(None, 8, ())], []]):
        writer.collect(stored)
        assert writer.ordered == 8
    writer.collect([[], [Stored(None, 8, None)]])
    assert writer.ordered is None, "one rank could not store it: the next version may order another"
    writer.ordered = 16
    writer.newest = manifest_of(16 + 129, 3)
    writer.collect([[Stored(None, 16, ())], []])
    assert writer.ordered is None, "one rank is so far behind that nothing may name its part any more"


def test_the_next_trainer_goes_on_with_jumps_of_its_own(run, tmp_path):
    run.steps(12)
    run.close()
    with closing(Drifting(tmp_path / "bucket", seed=1)) as resumed:
        resumed.steps(13)
        assert spans(resumed.newest.jumps) == [(0, 8), (12, 16), (16, 24)], "it went on from version 12"
        assert spans(resumed.newest.recipe().deltas)[0] == (0, 8)
        is_built(resumed.reader, resumed.newest.version, tmp_path)


def test_closing_does_not_wait_for_an_upload_that_hangs(tmp_path, monkeypatch, request, caplog):
    """No manifest would name the jump; and no file of it is left on this machine."""
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._CLOSING_S", 0.01)
    run = Drifting(tmp_path / "bucket")
    link = SlowLink(run.reader.bucket, "/jumps/")
    request.addfinalizer(link.up.set)
    for _ in range(8):
        run.step()
    link.wait()
    run.close()
    assert not run.outbox.shortcuts.folder.exists()
    assert caplog.text == ""


@pytest.mark.parametrize(("kind", "said"), [("tmpfs", True), ("ext4", False)])
def test_temporary_files_in_memory_are_said(tmp_path, monkeypatch, caplog, kind, said):
    """As Linux lists mounts; a folder is in the mount with the longest path above it."""
    folder = tmp_path / "a b"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / {'ext4' if said else 'tmpfs'} rw 0 0\nmemory {escaped} {kind} rw 0 0\n")
    monkeypatch.setattr(scratch, "_MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    Drifting(tmp_path / "bucket").close()
    assert (f"temporary files go to {folder}, which takes memory (tmpfs)" in caplog.text) == said
    assert ("set TMPDIR to a folder on a disk" in caplog.text) == said


@pytest.fixture
def anchors_are_due(monkeypatch):
    """At each version, because a join would fetch a delta."""
    monkeypatch.setattr(records, "ANCHOR_PAYS", 0.0)


def steps_of(jumps) -> set[tuple[int, int]]:
    return {(jump.base, jump.version) for jump in jumps}


def test_without_room_for_an_anchor_jumps_are_made(tmp_path, monkeypatch, anchors_are_due):
    run = Drifting(tmp_path / "bucket")
    full = SimpleNamespace(free=10)
    monkeypatch.setattr(shortcuts.shutil, "disk_usage", lambda folder: full)
    run.steps(70)
    run.close()
    assert run.newest.anchor.version == 0
    assert {(0, 64), (8, 16)} <= steps_of(run.newest.jumps)
    assert len(run.newest.recipe().deltas) < 10


def test_an_anchor_that_the_store_refuses_is_not_written_at_each_version(
    tmp_path, monkeypatch, anchors_are_due
):
    run = Drifting(tmp_path / "bucket")
    written = []

    def refuse(version, paths):
        written.append([*paths])
        raise BucketUnreachableError("no anchors")

    run.outbox._writer.put_weights = refuse
    run.steps(40)
    run.close()
    assert 2 <= len(written) <= 6
    assert (0, 8) in steps_of(run.newest.jumps)


def test_anchors_are_made_although_the_store_refuses_jumps(tmp_path, monkeypatch, anchors_are_due):
    run = Drifting(tmp_path / "bucket")
    refused = mock.Mock(side_effect=BucketUnreachableError("no jumps"))
    run.outbox._writer.put_jump = refused
    run.steps(100)
    run.close()
    assert refused.call_count > 8
    assert run.newest.anchor.version > 50
    assert len(run.outbox.shortcuts._unsent) <= shortcuts._UNSENT + 2


def test_a_full_disk_keeps_no_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shortcuts, "_SMALLEST", 0)
    monkeypatch.setattr(shortcuts, "_SHARE", 10**9)
    run = Drifting(tmp_path / "bucket")
    write = Path.write_bytes

    def full(self, data):
        if self.suffix != ".delta":
            return write(self, data)
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        run.steps(20)
    left = [path for path in run.outbox.shortcuts.folder.iterdir() if path.suffix == ".delta"]
    run.close()
    assert not left
