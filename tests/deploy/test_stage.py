"""The folders that are uploaded: all that their Dockerfiles copy, all that they import, and nothing else."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import World
from trainer.deploy.stage import APPS, CHECKOUT, stage

PACKAGES = {"env": {"env_space"}, "replica": {"inference_space", "shared"}}
IMPORTED = {"env": {"env_space"}, "replica": {"inference_space", "delta_weight_sync"}}


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


def test_the_front_matter_makes_it_a_docker_space_on_the_port_that_the_hub_asks(staged):
    front = yaml.safe_load((staged / "README.md").read_text().split("---")[1])
    assert front["sdk"] == "docker"
    assert front["app_port"] == 7860


def test_only_the_app_s_own_packages_are_there(app, staged):
    at_the_root = {"README.md", "Dockerfile", "requirements.lock", "LICENSE", "pyproject.toml"}
    tops = {name.split("/")[0] for name in names(staged)}
    assert tops - at_the_root == PACKAGES[app]
    assert not [name for name in names(staged) if "__pycache__" in name or "test" in name or "/." in name]


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


def test_files_that_the_app_reads_are_there(app, staged):
    data = {"env": ["env_space/words/answers-5.txt", "env_space/page/index.html"], "replica": []}
    styles = {"env": [], "replica": ["inference_space/dashboard/templates/page.html"]}
    assert not [name for name in data[app] + styles[app] if not (staged / name).is_file()]


def test_a_dry_run_writes_folders_and_plan_and_touches_nothing_else(world: World):
    before = world.hub.requests()
    world.up("--dry-run", "dry", "--replicas", "2")
    assert world.hub.requests() == before
    assert [path.name for path in world.folder.iterdir()] == ["dry"]
    assert {path.name for path in Path("dry").iterdir()} == {"env", "replica", "plan.json"}
    plan = json.loads(Path("dry/plan.json").read_text())
    assert [space["repo_id"] for space in plan["replicas"]] == [world.replica(1), world.replica(2)]
    assert world.fails("up", "--dry-run", "dry") == "deploy: --dry-run dry is not empty: name a new folder\n"


def test_a_dry_run_needs_no_token(world: World, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("SPACE_HF_TOKEN")
    world.up("--dry-run", "dry")
