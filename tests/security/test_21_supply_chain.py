"""What the Spaces are made of: nothing is installed but what a lock names by version and by hash."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.dockerfile import lock, parse

ROOT = Path(__file__).parents[2]
APPS = ("env_space", "inference_space")
HASH = re.compile(r"sha256:[0-9a-f]{64}")


@pytest.fixture(params=APPS)
def app(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def locked(app: str) -> dict[str, list[str]]:
    return lock((ROOT / app / "requirements.lock").read_text())


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


def test_a_lock_names_one_version_of_each_package_by_hash(app):
    for need, *hashes in locked(app).values():
        (pin,) = Requirement(need).specifier
        assert pin.operator == "==", f"{need}; run `make locks`"
        assert hashes, f"{need} has no hash; run `make locks`"
        assert all(HASH.fullmatch(found) for found in hashes), need


def test_a_lock_fits_what_the_app_and_the_library_ask_for(app):
    pins = locked(app)
    for need in wanted(app):
        name = canonicalize_name(need.name)
        assert name in pins, f"{app} lacks {need}; run `make locks`"
        (pin,) = Requirement(pins[name][0]).specifier
        assert need.specifier.contains(pin.version), f"{app}: {need}, locked is {pin}; run `make locks`"


def test_the_image_s_own_vllm_and_torch_are_left_alone():
    assert not {"vllm", "torch", "transformers"} & locked("inference_space").keys()


def test_a_dockerfile_installs_nothing_that_has_no_hash(app):
    runs = [rest for name, rest in parse((ROOT / app / "Dockerfile").read_text()) if name == "RUN"]
    installs = [run for run in runs if "install" in run]
    locked = "python3 -m pip install --no-cache-dir --require-hashes --only-binary=:all: -r requirements.lock"
    here = "python3 -m pip install --no-index --no-deps --no-build-isolation ."
    assert installs == [locked, here][: len(installs)]
    assert installs
    assert not [run for run in runs if re.search(r"\b(curl|wget|apt|apt-get|git|uv|conda|npm)\b", run)]


def test_the_environments_image_is_named_by_what_it_is():
    """vLLM's is named by its tag: the digest could not be looked up where this was written."""
    (image,) = [rest for name, rest in parse((ROOT / "env_space/Dockerfile").read_text()) if name == "FROM"]
    assert HASH.fullmatch(image.partition("@")[2])


@pytest.mark.long
def test_nothing_that_is_locked_has_a_known_hole(app):
    """As the package index knows holes; where that cannot be asked, nothing is known."""
    file = ROOT / app / "requirements.lock"
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--require-hashes",
        "--disable-pip",
        "--progress-spinner=off",
    ]
    done = subprocess.run([*command, "-r", str(file)], capture_output=True, text=True, timeout=600)
    if "ServiceError" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("pip-audit asks the package index for known holes, which cannot be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr
