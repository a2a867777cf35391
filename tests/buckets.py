"""Fixtures: a bucket of each kind for every test. `pytest_plugins = ["tests.buckets"]` in conftest.py."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from delta_weight_sync.store import Bucket, open_bucket
from tests.support.hubsim import HubSim

# Production waits seconds between attempts. hf_xet reads this once per process.
XET_PAUSE = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms"}


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubSim]:
    """A simulated Hub for the whole session. Tests that use it name `hub_env` or `bucket_url` too."""
    with HubSim(tmp_path_factory.mktemp("hub")) as sim:
        yield sim


@pytest.fixture
def hub_env(hub: HubSim, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Points this process and its children to `hub`, with a token that may write; ends all faults after."""
    # One home for the session, like the one server: the client remembers there what it has uploaded.
    for name, value in (hub.env(hub.root / "client") | XET_PAUSE).items():
        monkeypatch.setenv(name, value)
    yield
    hub.clear()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A simulated S3 for the whole session."""
    from moto.server import ThreadedMotoServer  # slow to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3_env(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points this process and its children to the simulated S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


REMOTE = {"hub", "s3_endpoint"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks a simulated Hub or S3 is not part of `make check`; see the markers in pyproject.toml."""
    for item in items:
        if REMOTE.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.full)


STORES = ["file", *(pytest.param(store, marks=pytest.mark.full) for store in ("s3", "hf"))]


@pytest.fixture(params=STORES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a bucket that does not exist yet, for each kind of store."""
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    if request.param == "s3":
        request.getfixturevalue("s3_env")
        return f"s3://{uuid4().hex}/policies"
    request.getfixturevalue("hub_env")
    return f"hf://buckets/team/{uuid4().hex}/policies"


@pytest.fixture
def bucket_url(empty_url: str) -> str:
    """The URL of an empty bucket, for each kind of store; usable from other processes as well."""
    open_bucket(empty_url, create=True)
    return empty_url


@pytest.fixture
def bucket(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)
