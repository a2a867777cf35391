"""The Spaces install only packages that a lock names by version and by hash."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.dockerfile import lock, parse

ROOT = Path(__file__).parents[3]
APPS = ("env_space", "inference_space")
HASH = re.compile(r"sha256:[0-9a-f]{64}")


@pytest.fixture(params=APPS)
def app(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def locked(app: str) -> list[tuple[Requirement, list[str]]]:
    return lock((ROOT / app / "requirements.lock").read_text())


def names(app: str) -> set[str]:
    return {canonicalize_name(need.name) for need, _ in locked(app)}


def wanted(app: str) -> list[Requirement]:
    """What the Space installs beside what its image has."""
    lines = (ROOT / app / "requirements.txt").read_text().splitlines()
    needs = [line.split(" #")[0] for line in lines if line[:1].isalpha()]
    if app == "inference_space":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        needs = [need for need in needs if not need.startswith("vllm==")]
        needs += project["project"]["dependencies"] + project["project"]["optional-dependencies"]["s3"]
        needs += project["build-system"]["requires"]
    return [Requirement(need) for need in needs]


@pytest.mark.finding(21)
def test_a_lock_names_each_package_by_version_and_hash(app):
    assert len(locked(app)) >= len(wanted(app))
    for need, hashes in locked(app):
        assert [pin.operator for pin in need.specifier] == ["=="], f"{need}; run `make locks`"
        assert hashes, f"{need} has no hash; run `make locks`"
        assert all(HASH.fullmatch(found) for found in hashes), need


@pytest.mark.finding(21)
def test_a_lock_fits_what_the_app_and_the_library_ask_for(app):
    for need in wanted(app):
        pins = [pin for pin, _ in locked(app) if canonicalize_name(pin.name) == canonicalize_name(need.name)]
        versions = [pin.version for locked in pins for pin in locked.specifier]
        assert versions, f"{app}/requirements.lock lacks {need}; run `make locks`"
        assert all(map(need.specifier.contains, versions)), f"{app}: {need}, not {versions}; run `make locks`"


@pytest.mark.finding(21)
def test_the_image_s_own_vllm_and_torch_are_left_alone():
    assert not {"vllm", "torch", "transformers"} & names("inference_space")


@pytest.mark.finding(21)
def test_a_dockerfile_installs_nothing_that_has_no_hash(app):
    runs = [rest for name, rest in parse((ROOT / app / "Dockerfile").read_text()) if name == "RUN"]
    installs = [run for run in runs if "install" in run]
    locked = "python3 -m pip install --no-cache-dir --require-hashes --only-binary=:all: -r requirements.lock"
    here = "python3 -m pip install --no-index --no-deps --no-build-isolation ."
    assert installs == [locked, here][: len(installs)]
    assert installs
    assert not [run for run in runs if re.search(r"\b(curl|wget|apt|apt-get|git|uv|conda|npm)\b", run)]


@pytest.mark.finding(21)
def test_the_environments_image_is_named_by_what_it_is():
    """vLLM's is named by its tag: the digest could not be looked up where this was written."""
    (image,) = [rest for name, rest in parse((ROOT / "env_space/Dockerfile").read_text()) if name == "FROM"]
    assert HASH.fullmatch(image.partition("@")[2])


@pytest.mark.finding(21)
@pytest.mark.long
def test_nothing_that_is_locked_has_a_known_hole(app):
    """Known to the package index, that is."""
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--format=json"]
    command += ["--progress-spinner=off", "--requirement", str(ROOT / app / "requirements.lock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "ServiceError" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("the package index, which pip-audit asks for known holes, cannot be reached from here")
    packages = json.loads(done.stdout)["dependencies"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        pytest.skip("the package index that is in use here knows of no holes, in whatever package")
    assert [package for package in packages if package.get("vulns")] == []
    assert unknown == []
