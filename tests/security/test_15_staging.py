"""What is uploaded to Spaces is what git tracks: nothing else of a checkout, and nothing behind links."""

import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.deploy import stage
from trainer.deploy.errors import DeployError
from trainer.deploy.stage import App

APPS: dict[str, App] = {"env_space": "env", "inference_space": "replica"}


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


@pytest.fixture(params=APPS)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkout(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with what one Space is made of; git ignores `.venv/` and `*secret*` there."""
    folder = tmp_path / "clone"
    for name in [*stage._ROOT_FILES["replica"], *stage._PACKAGES[APPS[package]]]:
        source, copy = stage.CHECKOUT / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    (folder / ".gitignore").write_text("__pycache__/\n.venv/\n*secret*\n")
    git(folder, "init")
    git(folder, "add", ".")
    monkeypatch.setattr(stage, "CHECKOUT", folder)
    return folder


def test_what_git_ignores_is_not_uploaded(checkout, package):
    whole = stage.files(APPS[package])
    for name in (".venv/lib/planted.py", "my_secrets.py", "words/secret.txt", "dashboard/static/secret.js"):
        path = checkout / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("KEY = 'planted'")
    assert stage.files(APPS[package]) == whole
    assert f"{package}/__init__.py" in whole


def test_what_is_new_to_git_is_asked_about(checkout, package):
    (checkout / package / "credentials.py").write_text("KEY = 'planted'")
    with pytest.raises(
        DeployError, match=rf"^git does not track {package}/credentials\.py: `git add` or rem"
    ):
        stage.files(APPS[package])


def test_no_link_is_followed(checkout, package):
    outside = checkout.parent / "outside"
    outside.mkdir()
    (outside / "key.py").write_text("KEY = 'planted'")
    (checkout / package / "linked.py").symlink_to(outside / "key.py")
    git(checkout, "add", ".")
    with pytest.raises(DeployError, match=r"linked\.py is a link, or lies behind one"):
        stage.files(APPS[package])


def test_no_folder_is_followed_that_became_a_link_since(checkout, package):
    shutil.move(checkout / package, checkout.parent / "elsewhere")
    (checkout / package).symlink_to(checkout.parent / "elsewhere")
    with pytest.raises(DeployError, match="is a link, or lies behind one"):
        stage.files(APPS[package])


def test_without_git_nothing_is_uploaded(checkout, package):
    shutil.rmtree(checkout / ".git")
    with pytest.raises(DeployError, match="run it from a clone of the repository"):
        stage.files(APPS[package])
