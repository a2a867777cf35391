"""The folders for the upload: all that their Dockerfiles copy, all that they import, and no other file."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trainer.deploy.conftest import World
from trainer.deploy import DeployError
from trainer.deploy import plan as module
from trainer.deploy.plan import APPS, CHECKOUT, App, files, stage

PACKAGES = {"env": {"env_space", "shared"}, "replica": {"inference_space", "shared"}}
PACKAGE_APPS: dict[str, App] = {"env_space": "env", "inference_space": "replica"}
DATA = {
    "env": {"env_space/words/answers-5.txt", "env_space/page/index.html"},
    "replica": {"inference_space/dashboard/templates/page.html"},
}
IMPORTED = {
    "env": {"env_space", "space_guard"},
    "replica": {"inference_space", "space_guard", "delta_weight_sync"},
}


@pytest.fixture(params=APPS)
def app(request) -> str:
    return request.param


@pytest.fixture
def staged(app: str, tmp_path: Path) -> Path:
    stage(app, tmp_path / app)
    return tmp_path / app


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_the_dockerfile_copies_is_there(staged):
    lines = re.findall(r"^COPY (.*)$", (staged / "Dockerfile").read_text(), re.M)
    sources = {word for line in lines for word in line.split()[:-1] if not word.startswith("--")}
    assert sources
    assert not [source for source in sources if not (staged / source).exists()]


def test_only_the_app_s_own_packages_are_there(app, staged):
    at_the_root = {"README.md", "Dockerfile", "requirements.lock", "LICENSE", "pyproject.toml"}
    at_the_root |= {"openenv.yaml", "openenv_probe.json"}
    tops = {name.split("/")[0] for name in names(staged)}
    assert tops - at_the_root == PACKAGES[app]
    assert not [name for name in names(staged) if "__pycache__" in name or "test" in name or "/." in name]
    assert names(staged) >= DATA[app]


def test_what_is_imported_is_there_or_comes_from_its_requirements(app, staged):
    places = (*CHECKOUT.iterdir(), *(CHECKOUT / "shared").iterdir())
    project = {path.name for path in places if (path / "__init__.py").exists()}
    imported = {module for file in staged.rglob("*.py") for module in _imports(file)}
    assert imported & project == IMPORTED[app]


def _imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain} | {
        node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    }


def test_a_dry_run_needs_no_token_and_touches_nothing_but_its_folder(world: World, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("SPACE_HF_TOKEN")
    before = world.hub.requests()
    world.up("--dry-run", "dry", "--replicas", "2")
    assert world.hub.requests() == before
    assert [path.name for path in world.folder.iterdir()] == ["dry"]
    assert {path.name for path in Path("dry").iterdir()} == {"env", "replica", "plan.json"}
    plan = json.loads(Path("dry/plan.json").read_text())
    assert [space["repo_id"] for space in plan["replicas"]] == [world.replica(1), world.replica(2)]
    assert world.fails("up", "--dry-run", "dry") == "deploy: --dry-run dry is not empty: name a new folder\n"


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


@pytest.fixture(params=PACKAGE_APPS)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkout(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with what one Space is made of; git ignores `.venv/` and `*secret*` there."""
    folder = tmp_path / "clone"
    for name in ["LICENSE", "pyproject.toml", package, "shared"]:
        source, copy = CHECKOUT / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    (folder / ".gitignore").write_text("__pycache__/\n.venv/\n*secret*\n")
    git(folder, "init")
    git(folder, "add", ".")
    monkeypatch.setattr(module, "CHECKOUT", folder)
    return folder


@pytest.mark.finding(15)
def test_what_git_ignores_is_not_uploaded(checkout, package):
    whole = files(PACKAGE_APPS[package])
    for name in (".venv/lib/planted.py", "my_secrets.py", "words/secret.txt", "dashboard/static/secret.js"):
        path = checkout / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("KEY = 'planted'")
    assert files(PACKAGE_APPS[package]) == whole
    assert f"{package}/__init__.py" in whole


@pytest.mark.finding(15)
def test_an_untracked_file_is_refused(checkout, package):
    (checkout / package / "credentials.py").write_text("KEY = 'planted'")
    with pytest.raises(
        DeployError, match=rf"^git does not track {package}/credentials\.py: `git add` or rem"
    ):
        files(PACKAGE_APPS[package])


@pytest.mark.finding(15)
def test_no_link_is_followed(checkout, package):
    outside = checkout.parent / "outside"
    outside.mkdir()
    (outside / "key.py").write_text("KEY = 'planted'")
    (checkout / package / "linked.py").symlink_to(outside / "key.py")
    git(checkout, "add", ".")
    with pytest.raises(DeployError, match=r"linked\.py is a link, or lies behind one"):
        files(PACKAGE_APPS[package])


@pytest.mark.finding(15)
def test_no_folder_is_followed_that_became_a_link(checkout, package):
    shutil.move(checkout / package, checkout.parent / "elsewhere")
    (checkout / package).symlink_to(checkout.parent / "elsewhere")
    with pytest.raises(DeployError, match="is a link, or lies behind one"):
        files(PACKAGE_APPS[package])


@pytest.mark.finding(15)
def test_without_git_nothing_is_uploaded(checkout, package):
    shutil.rmtree(checkout / ".git")
    with pytest.raises(DeployError, match="run it from a clone of the repository"):
        files(PACKAGE_APPS[package])
