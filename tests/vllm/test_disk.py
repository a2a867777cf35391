"""A replica's folders: what killed processes left is removed, and other users cannot reach in."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.errors import SettingsError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.scratch import PREFIX, Scratch
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm import server
from delta_weight_sync.vllm.disk import Layout, private_folder
from delta_weight_sync.vllm.follower import Follower
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from tests.support.fake_vllm import InMemoryVllm
from tests.support.real_run import RUN, Drifting

LEFT = ".0f0e0d.part"
OWNER = "from delta_weight_sync.scratch import *; own = Scratch(); print(own.path, flush=True); input()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def owner(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another replica's process, and its folder."""
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    folder = Path(process.stdout.readline().strip())
    (folder / "model.safetensors").write_bytes(b"gigabytes")
    return process, folder


@pytest.mark.finding(13)
@pytest.mark.finding("N13")
def test_the_folder_of_a_killed_replica_is_removed_and_that_of_a_living_one_stays(temporary) -> None:
    killed, left = owner(temporary)
    living, used = owner(temporary)
    young = temporary / f".{PREFIX}young"
    young.mkdir()
    killed.kill()
    killed.wait(60)
    try:
        mine = Scratch()
        assert not left.exists()
        assert (used / "model.safetensors").exists()
        assert young.exists(), "it is just being made"
        assert mine.path.exists()
    finally:
        living.communicate("\n", timeout=60)
        killed.communicate(timeout=60)
    assert not used.exists(), "it ended by itself"


@pytest.mark.finding(13)
def test_a_link_that_somebody_put_there_is_not_followed(temporary, tmp_path) -> None:
    (tmp_path / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    Scratch().close()
    assert (tmp_path / "precious").exists()


@pytest.mark.finding(13)
def test_a_replica_removes_what_was_half_fetched_and_keeps_what_is_whole(tmp_path) -> None:
    run = Drifting(tmp_path / "bucket")
    coming = tmp_path / "r" / "anchors" / "coming"
    version = tmp_path / "r" / "checkpoint"
    for folder in (tmp_path / "r", coming, version):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEFT).write_bytes(b"half")
    (coming / "config.json").write_bytes(b"whole")
    (tmp_path / "r" / "00000002.t1-00000000.safetensors").write_bytes(b"half a delta")
    reader = RunReader(open_bucket(run.url), RUN)
    Follower(reader, InMemoryVllm(), name="r", folder=tmp_path / "r", poll_s=1.0)
    assert list(tmp_path.glob("r/**/.*.part")) + list(tmp_path.glob("r/*.safetensors")) == []
    assert (coming / "config.json").exists()
    assert not version.exists()
    run.close()


def test_an_anchor_that_is_kept_does_not_count_as_progress(tmp_path, monkeypatch) -> None:
    run = Drifting(tmp_path / "bucket", tensors={"weight": (1024, 512)})
    reader = RunReader(open_bucket(run.url), RUN)
    said = list[str]()
    layout = Layout(reader, tmp_path / "r")
    layout.put(reader.manifest())
    manifest = run.step()
    monkeypatch.setattr(RunReader, "fetch_all", lambda *_: said.append(layout.progress()) or [])
    layout.put(manifest)
    assert said == [f"0.0 of {manifest.recipe().deltas[0].size / 1e6:.1f} MB"]
    run.close()


@pytest.mark.finding(17)
def test_a_folder_that_is_not_there_is_made_for_one_user(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(str(tmp_path / "deep" / "replica"), "REPLICA_FOLDER")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.finding(17)
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SettingsError, match=r"REPLICA_FOLDER: .* belongs to another user; name a folder"):
        VllmServer(Settings(bucket="file:///b", run="r", folder=str(tmp_path)))
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.finding(17)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir() or path.chmod(0o1777), r"may be written to by every user; name a folder"),
        (
            lambda path: path.write_text(""),
            r"replica cannot be created or locked \(File exists\); name a folder",
        ),
        (lambda path: path.mkdir() or (path / "mine").touch(), "holds other files; name a folder"),
    ],
)
def test_a_folder_that_everybody_may_write_to_or_a_file_is_refused(tmp_path, make, said):
    make(tmp_path / "replica")
    with pytest.raises(SettingsError, match=said):
        private_folder(str(tmp_path / "replica"), "DELTA_WEIGHT_SYNC_FOLDER")


@pytest.mark.finding(17)
def test_a_link_that_another_user_has_laid_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    link = tmp_path / "replica"
    link.symlink_to(tmp_path / "mine")
    assert private_folder(str(link), "REPLICA_FOLDER") == link, "one's own is none of theirs"
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
        with pytest.raises(SettingsError, match="belongs to another user"):
            private_folder(str(link), "REPLICA_FOLDER")


@pytest.mark.finding("N16")
def test_a_folder_of_another_replica_is_refused(tmp_path):
    server.check(server.Settings(run=f"{tmp_path.as_uri()}#x", folder=str(tmp_path)))  # keeps nothing
    private_folder(str(tmp_path), "REPLICA_FOLDER")
    with pytest.raises(SettingsError, match="is used by another replica; name a folder of your own"):
        private_folder(str(tmp_path), "REPLICA_FOLDER")
