"""The release folders: the same bytes each time, and what `hf upload` makes of them on the simulated Hub."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.trainer.deploy.conftest import OWNER, World
from trainer.deploy.folders import NAMES, main, write


def test_the_archives_depend_only_on_the_checkout(tmp_path):
    first = write(tmp_path / "first")
    os.utime(tmp_path / "first" / "wordle-env" / "README.md", (0, 0))
    second = write(tmp_path / "second")
    assert [archive.read_bytes() for archive in first] == [archive.read_bytes() for archive in second]
    for archive in first:
        with tarfile.open(archive) as tar:
            names = tar.getnames()
        assert all(name.startswith(archive.name.removesuffix(".tar.gz") + "/") for name in names)
        folder = Path(str(archive).removesuffix(".tar.gz"))
        assert {*names} == {
            f"{folder.name}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()
        }
    page = {path.name for path in (tmp_path / "first" / "wordle-page").iterdir()}
    assert page >= {"index.html", "README.md", "card.png", "words", "run"}
    assert not page & {"node_modules", "vendor"}


@pytest.mark.long
def test_the_printed_commands_make_spaces_that_build(world: World, tmp_path, capsys):
    """With the real `hf`."""
    main([str(tmp_path / "spaces")])
    commands = re.findall(r"^hf .*", capsys.readouterr().out, re.M)
    hf = shutil.which("hf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hf
    for command in commands:
        words = command.replace("ME/wordle", f"{OWNER}/{world.name}").split()
        done = subprocess.run([hf, *words[1:]], env={**os.environ}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for app, name in NAMES.items():
        space = world.hub.space(f"{OWNER}/{name.replace('wordle', world.name)}")
        folder = tmp_path / "spaces" / name
        sent = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert space["files"].keys() - {".gitattributes"} == sent
        assert space["stage"] in (("RUNNING",) if app == "page" else ("BUILDING", "APP_STARTING", "RUNNING"))
