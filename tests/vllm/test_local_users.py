"""Another user of the machine puts nothing into a replica's folder: what is read from it is run, or served.

That nothing of a running vLLM listens for others, and that nothing it writes can be read by them, stands in
tests/live/test_public_port.py.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.errors import SettingsError
from delta_weight_sync.vllm.disk import private_folder
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer

pytestmark = pytest.mark.finding(17)


def test_a_folder_that_is_not_there_is_made_for_one_user(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(str(tmp_path / "deep" / "replica"), "REPLICA_FOLDER")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SettingsError, match=r"REPLICA_FOLDER: .* belongs to another user; name a folder"):
        VllmServer(Settings(bucket="file:///b", run="r", folder=str(tmp_path)))
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(SettingsError, match="may be written to by every user; name a folder of your own"):
        private_folder(str(tmp_path), "DELTA_WEIGHT_SYNC_FOLDER")


def test_a_link_that_another_user_has_laid_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    link = tmp_path / "replica"
    link.symlink_to(tmp_path / "mine")
    assert private_folder(str(link), "REPLICA_FOLDER") == link, "one's own is none of theirs"
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
        with pytest.raises(SettingsError, match="belongs to another user"):
            private_folder(str(link), "REPLICA_FOLDER")


def test_a_file_in_its_place_is_one_sentence(tmp_path):
    (tmp_path / "replica").write_text("")
    with pytest.raises(SettingsError, match=r"replica cannot be made \(File exists\); name a folder"):
        private_folder(str(tmp_path / "replica"), "REPLICA_FOLDER")


@pytest.mark.full
def test_the_space_ends_with_the_sentence(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    settings = {
        "REPLICA_BUCKET": tmp_path.as_uri(),
        "REPLICA_RUN": "r",
        "REPLICA_FOLDER": str(tmp_path / "open"),
    }
    command = [sys.executable, "-m", "inference_space.app"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    said = f"{settings['REPLICA_FOLDER']} may be written to by every user"
    assert done.stderr.splitlines()[-1].startswith(f"replica: set these variables: REPLICA_FOLDER: {said}")
    assert "Traceback" not in done.stderr
    assert list(Path(settings["REPLICA_FOLDER"]).iterdir()) == []
