"""Jumps over several versions and anchors: made beside the publisher, named by a later version, exact."""

from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch

from delta_weight_sync.checkpoint import WEIGHTS
from delta_weight_sync.codec import Delta, Encoding
from delta_weight_sync.errors import BucketUnreachableError
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.writer import RunWriter, Stored
from delta_weight_sync.records import DeltaRef
from delta_weight_sync.store import open_bucket
from tests.support.real_run import RUN, Drifting, SlowLink, is_built
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


SHARES = {"in memory": (1 << 24, 3), "a file after some versions": (3000, 10**9), "files": (0, 10**9)}


def jumps(
    folder: Path, dtype: torch.dtype, encoding: Encoding, monkeypatch, budget: tuple[int, int]
) -> list[bytes]:
    """All jumps of a run, in which weights change and change back, that a second trainer resumes."""
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._SMALLEST", budget[0])
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._SHARE", budget[1])
    for life in range(2):
        run = Drifting(folder, seed=life, encoding=encoding)
        run.weights = {name: weight.to(dtype) for name, weight in run.weights.items()}
        before = {name: weight.clone() for name, weight in run.weights.items()}
        for number in range(18):
            run.step()
            if number % 3 == 1:  # back to the weights of the start, except for a few
                for name, weight in run.weights.items():
                    weight.view(-1)[number:].copy_(before[name].view(-1)[number:])
            run.settle()
        run.close()
    jumps = sorted((folder / f"runs/{RUN}/jumps").iterdir(), key=lambda path: path.name.split(".t")[0])
    return [path.read_bytes() for path in jumps]


@pytest.mark.parametrize(("dtype", "encoding"), [(torch.float32, "fast"), (torch.bfloat16, "small")])
def test_a_jump_merged_from_patches_is_the_difference_of_two_checkpoints(
    tmp_path, monkeypatch, dtype, encoding
):
    """Byte for byte, also after a resume and where patches outgrow their budget on the way."""
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda _: False)
    made = [jumps(tmp_path / name, dtype, encoding, monkeypatch, budget) for name, budget in SHARES.items()]
    assert len(made[0]) == 4
    assert made[0] == made[1] == made[2]


def test_a_short_jump_takes_no_copy_of_the_checkpoint_and_decodes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts.apply_delta", None)
    run.steps(18)
    assert spans(run.newest.jumps)[-2:] == [(0, 8), (8, 16)]
    assert not (run.outbox.shortcuts.folder / "from-8").exists()
    jump = run.newest.jumps[-1]
    delta = Delta(run.reader.fetch(jump, tmp_path))
    assert (delta.base, delta.version, sum(t.changes for t in delta.tensors)) == (8, 16, jump.changed)


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


def test_a_full_disk_costs_shortcuts_and_nothing_else(run, tmp_path, monkeypatch, caplog):
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("delta_weight_sync.publish.shortcuts.shutil.copytree", full)
        patch.setattr("delta_weight_sync.publish.shortcuts._budget", lambda _: 0)  # patches are in files
        run.steps(2)
    assert "no jumps and anchors for now: No space left on device" in caplog.text
    monkeypatch.setattr("delta_weight_sync.publish.shortcuts._RESTART_EVERY", 4)
    run.steps(15)
    assert spans(run.newest.jumps) == [(4, 8), (8, 16)]
    assert run.newest.version == 17
    assert [*run.outbox.shortcuts.folder.glob("*.delta")] == []
    is_built(run.reader, 17, tmp_path)


def test_an_anchor_is_named_though_what_comes_after_its_upload_fails(run, monkeypatch):
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: not (self.ordered or self._new_anchor))
    monkeypatch.setattr(RunWriter, "look_for_damage", mock.Mock(side_effect=BucketUnreachableError("down")))
    run.steps(2)
    assert run.newest.anchor.version == 1


def test_a_copy_that_somebody_wrote_into_makes_no_jump(run, caplog):
    run.steps(7)
    path = run.outbox.shortcuts.path / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run.steps(2)
    assert "version 8 has digest" in caplog.text
    assert run.newest.jumps == ()


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
    writer.ordered, writer.newest = 16, manifest_of(16 + 129, 3)
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
