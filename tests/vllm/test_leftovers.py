"""What a process that was killed left on the disk is removed by the next, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.disk import SCRATCH_PREFIX, scratch_folder
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import Mortal
from tests.support.real_run import RUN, Drifting

pytestmark = pytest.mark.finding(13)

LEFT = ".0f0e0d.part"
OWNER = "from delta_weight_sync.vllm.disk import *; print(scratch_folder(), flush=True); input()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def owner(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another replica's process, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "model.safetensors").write_bytes(b"gigabytes")
    return process, folder


def test_the_folder_of_a_killed_replica_is_removed_and_that_of_a_living_one_stays(temporary) -> None:
    killed, left = owner(temporary)
    living, used = owner(temporary)
    young = temporary / f"{SCRATCH_PREFIX}young"
    young.mkdir()
    killed.kill()
    killed.wait(60)
    try:
        mine = scratch_folder()
        assert not left.exists()
        assert (used / "model.safetensors").exists()
        assert young.exists(), "it is just being made"
        assert mine.exists()
    finally:
        living.communicate("\n", timeout=60)
        killed.communicate(timeout=60)
    assert not used.exists(), "it ended by itself"


def test_a_link_that_somebody_put_there_is_not_followed(temporary, tmp_path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / ".alive").touch()
    (temporary / f"{SCRATCH_PREFIX}link").symlink_to(tmp_path / "precious")
    scratch_folder()
    assert (tmp_path / "precious").exists()


def test_a_replica_removes_what_was_half_fetched_and_keeps_what_is_whole(tmp_path) -> None:
    run = Drifting(tmp_path / "bucket")
    coming, version = tmp_path / "r" / "anchors" / "coming", tmp_path / "r" / "checkpoint"
    for folder in (tmp_path / "r", coming, version):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEFT).write_bytes(b"half")
    (coming / "config.json").write_bytes(b"whole")
    (tmp_path / "r" / "00000002.t1-00000000.safetensors").write_bytes(b"half a delta")
    reader = RunReader(open_bucket(run.url), RUN)
    Follower(reader, Mortal(), name="r", folder=tmp_path / "r", poll_s=1.0)
    assert list(tmp_path.glob("r/**/.*.part")) + list(tmp_path.glob("r/*.safetensors")) == []
    assert (coming / "config.json").exists()
    assert not version.exists()
    run.close()


def test_follow_removes_what_was_half_built_before_it_looks(tmp_path) -> None:
    run = Drifting(tmp_path / "bucket")
    building = tmp_path / "kept" / ".building"
    building.mkdir(parents=True)
    (building / LEFT).write_bytes(b"half")
    with CheckpointFolder(RunReader(open_bucket(run.url), RUN), tmp_path / "kept"):
        assert not building.exists()
    run.close()
