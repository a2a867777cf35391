"""The folders for the upload: what their Dockerfiles copy and import, no other file, and what is locked."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.dockerfile import lock, parse
from tests.trainer.deploy.conftest import World
from trainer.deploy import DeployError
from trainer.deploy import plan as module
from trainer.deploy.plan import APPS, CHECKOUT, App, files, stage

PACKAGES = {"env": "env_space", "replica": "inference_space"}
DATA = {
    "env": {"env_space/words/answers-5.txt", "env_space/page/index.html"},
    "replica": {"inference_space/dashboard/templates/page.html"},
}


@pytest.fixture(params=APPS)
def app(request) -> App:
    return request.param


@pytest.fixture
def staged(app: App, tmp_path: Path) -> Path:
    stage(app, tmp_path / app)
    return tmp_path / app


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_the_dockerfile_copies_is_there_and_no_other_package(app, staged):
    lines = re.findall(r"^COPY (.*)$", (staged / "Dockerfile").read_text(), re.M)
    sources = {word for line in lines for word in line.split()[:-1] if not word.startswith("--")}
    assert sources
    assert not [source for source in sources if not (staged / source).exists()]
    at_the_root = {"README.md", "Dockerfile", "requirements.lock", "LICENSE", "pyproject.toml"}
    at_the_root |= {"openenv.yaml", "openenv_probe.json"}
    tops = {name.split("/")[0] for name in names(staged)}
    assert tops - at_the_root == {PACKAGES[app], "shared"}
    assert not [name for name in names(staged) if "__pycache__" in name or "test" in name or "/." in name]
    assert names(staged) >= DATA[app]


def test_a_dry_run_needs_no_token_and_touches_nothing_but_its_folder(world: World, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("SPACE_HF_TOKEN")
    before = world.hub.requests()
    world.up("--dry-run", "dry", "--replicas", "2")
    assert world.hub.requests() == before
    assert [path.name for path in world.folder.iterdir()] == ["dry"]
    assert {path.name for path in Path("dry").iterdir()} == {"env", "replica", "plan.json"}
    plan = json.loads(Path("dry/plan.json").read_text())
    assert [space["repo_id"] for space in plan["spaces"]] == [world.env, world.replica(1), world.replica(2)]
    assert world.fails("up", "--dry-run", "dry") == "deploy: --dry-run dry is not empty: name a new folder\n"


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


@pytest.fixture
def package(app: App) -> str:
    return PACKAGES[app]


@pytest.fixture
def checkout(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with what one Space is made of; git ignores `.venv/` and `*secret*` there."""
    folder = tmp_path / "clone"
    for name in ["LICENSE", "pyproject.toml", package, "shared"]:
        source = CHECKOUT / name
        copy = folder / name
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
def test_what_git_ignores_is_not_uploaded(checkout, app, package):
    whole = files(app)
    for name in (".venv/lib/planted.py", "my_secrets.py", "words/secret.txt", "dashboard/static/secret.js"):
        path = checkout / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("KEY = 'planted'")
    assert files(app) == whole
    assert f"{package}/__init__.py" in whole


def untracked(checkout: Path, app: Path) -> None:
    (app / "credentials.py").write_text("KEY = 'planted'")


def link(checkout: Path, app: Path) -> None:
    (checkout.parent / "key.py").write_text("KEY = 'planted'")
    (app / "linked.py").symlink_to(checkout.parent / "key.py")
    git(checkout, "add", ".")


def linked_folder(checkout: Path, app: Path) -> None:
    shutil.move(app, checkout.parent / "elsewhere")
    app.symlink_to(checkout.parent / "elsewhere")


def no_git(checkout: Path, app: Path) -> None:
    shutil.rmtree(checkout / ".git")


@pytest.mark.finding(15)
@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (untracked, r"^git does not track {}/credentials\.py: `git add` or rem"),
        (link, r"linked\.py is missing, a link, or in a linked folder"),
        (linked_folder, "is missing, a link, or in a linked folder"),
        (no_git, "run deploy from a clone of the repository"),
    ],
)
def test_what_may_not_be_uploaded_is_refused(checkout, app, package, plant, sentence):
    plant(checkout, checkout / package)
    with pytest.raises(DeployError, match=sentence.format(package)):
        files(app)


HASH = re.compile(r"sha256:[0-9a-f]{64}")


def locked(package: str) -> list[tuple[Requirement, list[str]]]:
    return lock((CHECKOUT / package / "requirements.lock").read_text())


def wanted(package: str) -> list[Requirement]:
    """What the Space installs beside what its image has."""
    lines = (CHECKOUT / package / "requirements.txt").read_text().splitlines()
    needs = [line.split(" #")[0] for line in lines if line[:1].isalpha()]
    if package == "inference_space":
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
        needs = [need for need in needs if not need.startswith("vllm==")]
        needs += project["project"]["dependencies"] + project["project"]["optional-dependencies"]["s3"]
        needs += project["build-system"]["requires"]
    return [Requirement(need) for need in needs]


@pytest.mark.finding(21)
def test_a_lock_names_each_package_by_version_and_hash(package):
    assert len(locked(package)) >= len(wanted(package))
    for need, hashes in locked(package):
        assert [pin.operator for pin in need.specifier] == ["=="], f"{need}; run `make locks`"
        assert hashes, f"{need} has no hash; run `make locks`"
        assert all(HASH.fullmatch(found) for found in hashes), need


@pytest.mark.finding(21)
def test_a_lock_fits_what_the_app_and_the_library_ask_for(package):
    pins = {canonicalize_name(pin.name): pin.specifier for pin, _ in locked(package)}
    for need in wanted(package):
        versions = [pin.version for pin in pins.get(canonicalize_name(need.name), ())]
        assert versions, f"{package}/requirements.lock lacks {need}; run `make locks`"
        fits = all(map(need.specifier.contains, versions))
        assert fits, f"{package}: {need}, not {versions}; run `make locks`"


@pytest.mark.finding(21)
def test_the_image_s_own_vllm_and_torch_are_left_alone():
    names = {canonicalize_name(need.name) for need, _ in locked("inference_space")}
    assert not {"vllm", "torch", "transformers"} & names


@pytest.mark.finding(21)
def test_a_dockerfile_installs_nothing_that_has_no_hash(package):
    runs = [rest for name, rest in parse((CHECKOUT / package / "Dockerfile").read_text()) if name == "RUN"]
    installs = [run for run in runs if "install" in run]
    locked = "python3 -m pip install --no-cache-dir --require-hashes --only-binary=:all: -r requirements.lock"
    here = "python3 -m pip install --no-index --no-deps --no-build-isolation ."
    assert installs == [locked, here][: len(installs)]
    assert installs
    assert not [run for run in runs if re.search(r"\b(curl|wget|apt|apt-get|git|uv|conda|npm)\b", run)]


@pytest.mark.finding(21)
@pytest.mark.long
def test_nothing_that_is_locked_has_a_known_hole(package):
    """Known to the package index, that is."""
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--format=json"]
    command += ["--progress-spinner=off", "--requirement", str(CHECKOUT / package / "requirements.lock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "ServiceError" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("the package index, which pip-audit asks for known holes, cannot be reached from here")
    packages = json.loads(done.stdout)["dependencies"]
    unknown = [found["name"] for found in packages if "skip_reason" in found]
    if len(unknown) == len(packages):
        pytest.skip("the package index that is in use here knows of no holes, in whatever package")
    assert [found for found in packages if found.get("vulns")] == []
    assert unknown == []
