"""huggingface_hub's own tests of buckets and Spaces, written against the real Hub, pass on the simulator.

So the simulator answers as the Hub does.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.support import hubsim
from tests.support.hubsim import HubSim

CONFTEST = Path(hubsim.__file__).with_name("own_conftest.py")
PACKAGE = f"huggingface_hub=={huggingface_hub.__version__}"
TESTS = [
    "test_buckets.py",
    "test_buckets_cli.py",
    "test_buckets_hf_file_system.py",
    "test_bucket_live_follow.py",
    "test_hf_api.py::TestSpaceAPIProduction",
    "test_hf_api.py::TestHfApiAuthCheck",
]
PASSED = 238  # how many they are
NOT_HERE = {  # test -> why it does not pass
    "test_buckets_hf_file_system.TestHfFileSystemBucketRW.test_append_file": "the client cannot append yet",
    "test_buckets.test_copy_files_repo_to_bucket_with_revision": "the simulator has no branches",
}


def pip(*command: str | Path) -> None:
    """Run pip. Without PyPI, skip the test."""
    options = ["--quiet", "--retries", "1", "--disable-pip-version-check"]
    whole = [sys.executable, "-m", "pip", *command, *options]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    if "from versions: none" in done.stderr:
        pytest.skip("PyPI, from where huggingface_hub's own tests come, cannot be reached")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def own_tests(request: pytest.FixtureRequest) -> Path:
    """A folder with the tests of the installed release as package hub_tests; kept in pytest's cache."""
    folder = Path(request.config.cache.mkdir(PACKAGE))
    done = folder / "complete"
    if not done.exists():
        shutil.rmtree(folder)
        folder.mkdir()
        source_only = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation")
        pip("download", *source_only, "--dest", folder, PACKAGE)
        pip("install", "--no-deps", "--target", folder / "lib", "pytest-mock==3.15.1")
        (source,) = folder.glob("*.tar.gz")
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        shutil.move(folder / source.name.removesuffix(".tar.gz") / "tests", folder / "hub_tests")
        (folder / "hub_tests" / "__init__.py").touch()
        done.touch()
    shutil.copy(CONFTEST, folder / "hub_tests" / "conftest.py")
    return folder


def accounts(hub: HubSim, folder: Path) -> None:
    """Give the Hub the users, organizations, tokens and the one Space that the tests know of."""
    known = runpy.run_path(str(folder / "hub_tests" / "testing_constants.py"))
    hub.add_account("victor", type="org")
    hub.add_account("user", orgs=["victor"])
    hub.add_account(known["ENTERPRISE_ORG"], type="org", visibility="private")
    for prefix, orgs in (("", []), ("OTHER_", []), ("ENTERPRISE_", [known["ENTERPRISE_ORG"]])):
        hub.add_account(known[f"{prefix}USER"], orgs=orgs)
        hub.add_token(known[f"{prefix}TOKEN"], user=known[f"{prefix}USER"])
    hub.add_token("hf_fake_token", user="user")
    api = HfApi(endpoint=hub.url, token="hf_fake_token")
    api.create_repo("victor/static-space", repo_type="space", space_sdk="static")


def run(hub: HubSim, folder: Path, scratch: Path) -> dict[str, bool]:
    """Run the tests in a process of their own: name -> passed. What it prints stays in `scratch`."""
    environment = {**os.environ, **hub.env(scratch / "home", token=""), "PYTHONPATH": str(folder / "lib")}
    report = scratch / "report.xml"
    plain = ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider"]
    options = [*plain, f"--junitxml={report}"]
    tests = [folder / "hub_tests" / name for name in TESTS]
    with (scratch / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "pytest", "-q", *options, *tests]
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    passed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".removeprefix("hub_tests.")
        passed[name] = all(case.find(tag) is None for tag in ("failure", "error", "skipped"))
    return passed


@pytest.mark.long
def test_the_clients_own_tests_pass(own_tests: Path, tmp_path: Path) -> None:
    with HubSim(tmp_path / "hub") as hub:
        accounts(hub, own_tests)
        passed = run(hub, own_tests, tmp_path)
    assert {name for name in passed if not passed[name]} == NOT_HERE.keys()
    assert len(passed) == PASSED + len(NOT_HERE)
