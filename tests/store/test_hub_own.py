"""huggingface_hub's own tests of buckets and Spaces, written against the real Hub, pass on the simulator.

So the simulator answers as the Hub does. An older release, 1.33, uses a bucket as the newest release does.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from delta_weight_sync.errors import ObjectMissingError
from delta_weight_sync.store import open_bucket
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
    "test_hf_api.py::TestCommitApi",
    "test_hf_api.py::TestHfApiDeleteFolder",
    "test_hf_api.py::TestHfApiDeleteFiles",
    "test_hf_api.py::TestHfApiListRepoTree",
    "test_hf_api.py::TestHfApiAuthCheck",
]
LEFT_OUT = "TestCommitApi::test_create_commit_huge_regular_files"  # moves 110 MB, which takes ten seconds
PASSED = 289  # how many they are
PULL_REQUEST = "the simulator has no pull requests"
REAL = "asks for a certain repository of the real Hub"
NOT_HERE = {  # test -> why it does not pass
    "test_buckets_hf_file_system.TestHfFileSystemBucketRW.test_append_file": "the client cannot append yet",
    "test_hf_api.TestCommitApi.test_upload_file_create_pr": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_upload_folder_create_pr": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_create_commit_create_pr": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_create_commit_create_pr_against_branch": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_create_commit_create_pr_on_foreign_repo": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_empty_commit_on_pr": PULL_REQUEST,
    "test_hf_api.TestCommitApi.test_create_commit_repo_id_case_insensitive": "names keep their case here",
    "test_hf_api.TestHfApiListRepoTree.test_list_tree_with_expand": REAL,
    "test_hf_api.TestHfApiListRepoTree.test_list_files_without_expand": REAL,
    "test_hf_api.TestHfApiListRepoTree.test_list_tree_with_xethash": REAL,
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
    options = [*plain, f"--junitxml={report}", f"--deselect=hub_tests/test_hf_api.py::{LEFT_OUT}"]
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


ROOT = Path(__file__).parents[2]
OLD_CLIENT = """
import sys
from pathlib import Path
import huggingface_hub
from delta_weight_sync.errors import ObjectMissingError
from delta_weight_sync.store import open_bucket

url, folder = sys.argv[1], Path(sys.argv[2])
bucket = open_bucket(url, create=True)
assert bucket.get("from/new") == b"hello"
bucket.put("from/old", b"x" * 100_000)
bucket.put("from/old", b"y" * 100_000)
bucket.fetch("from/old", folder / "fetched", 100_000)
assert (folder / "fetched").read_bytes() == b"y" * 100_000
assert [(o.key, o.size) for o in bucket.list("from/")] == [("from/new", 5), ("from/old", 100_000)]
notice, polls = bucket.notifications("from/"), 0
while notice.describe(1.0) != "notified by the store":
    notice.due(1.0)
    notice.wait(1.0)
    assert (polls := polls + 1) < 60
notice.close()
bucket.delete(["from/new"])
assert bucket.stat("from/new") is None
try:
    bucket.get("from/new")
except ObjectMissingError:
    print("done with", huggingface_hub.__version__)
"""


@pytest.mark.long
@pytest.mark.usefixtures("hub_env")
def test_the_old_client_and_the_new_one_share_a_bucket(hub: HubSim, tmp_path: Path) -> None:
    """The old one cannot share an environment with the rest of the suite."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "huggingface_hub==1.33.0"]
    subprocess.run(install, check=True, capture_output=True)

    url = f"hf://buckets/team/{uuid4().hex}"
    bucket = open_bucket(url, create=True)
    bucket.put("from/new", b"hello")
    environment = {**os.environ, **hub.env(tmp_path / "home"), "PYTHONPATH": str(ROOT / "shared")}
    result = subprocess.run(
        [python, "-c", OLD_CLIENT, url, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert result.stdout == "done with 1.33.0\n", result.stderr
    assert bucket.get("from/old") == b"y" * 100_000
    with pytest.raises(ObjectMissingError):
        bucket.get("from/new")
