"""One damaged object does not lose a run: HEAD is read around, and the next trainer goes on where it was."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.watch import Watcher
from tests.support.published_run import write_run


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run of four versions; the folder that is its bucket."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    write_run(folder.as_uri(), tmp_path / "base", versions=4)
    return folder


def reader_of(folder: Path, run: str = "test") -> RunReader:
    return RunReader(open_bucket(folder.as_uri()), run)


def head_in(folder: Path) -> Path:
    (path,) = (folder / "runs/test/heads").iterdir()
    return path


def torn(head: Path) -> None:
    head.write_bytes(head.read_bytes()[:60])


def empty(head: Path) -> None:
    head.write_bytes(b"")


def flipped(head: Path) -> None:
    head.write_bytes(head.read_bytes().replace(b'"version":3', b'"version":2'))


def foreign(head: Path) -> None:
    """The HEAD of another run: it names a manifest that is not ours."""
    folder = head.parents[3]
    write_run(folder.as_uri(), folder.parent / "other", versions=2, run="other")
    (other,) = (folder / "runs/other/heads").iterdir()
    shutil.copy(other, head)
    shutil.rmtree(folder / "runs/other")


DAMAGES: list[Callable[[Path], None]] = [torn, empty, flipped, foreign, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_read_around(written: Path, damage: Callable[[Path], None], tmp_path: Path) -> None:
    digest = reader_of(written).manifest().digest
    damage(head_in(written))
    newest = Watcher(reader_of(written)).poll()
    assert newest is not None
    assert (newest.version, newest.digest) == (3, digest)
    assert to_hex(state_digest(reader_of(written).checkout(newest, tmp_path / "out"))) == digest


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_trainer_goes_on_from_a_damaged_head(written: Path, damage: Callable[[Path], None]) -> None:
    damage(head_in(written))
    writer = RunWriter(open_bucket(written.as_uri()), "test", model="m", assets=None)
    assert writer.newest is not None
    assert writer.newest.version == 3
    assert writer.newest == reader_of(written).manifest(), "and HEAD is whole again"
    reader_of(written).require_intact()


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
    writer = RunWriter(open_bucket(written.as_uri()), "test", model="m", assets=None)
    claim = head_in(written).read_bytes()
    decided = writer.commit(
        writer.put_delta(4, b"delta", 1), None, digest="0" * 16, sync=5, total=1, created_at=0.0
    )
    head_in(written).write_bytes(claim)
    rolled = RunWriter(open_bucket(written.as_uri()), "test", model="m", assets=None)
    assert rolled.newest == decided
