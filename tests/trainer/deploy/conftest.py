"""The command line against the simulated Hub, with real apps behind the Spaces."""

import io
import json
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from huggingface_hub import HfApi

from tests.env_space.service import Space
from tests.support.http_server import Request, answering
from tests.support.hubsim import HubSim
from trainer.deploy import hub as deploy_hub
from trainer.deploy.__main__ import main

OWNER = "user"
KEY = "k" * 40
WRITE = "hf_deployTestWriteToken"
READ = "hf_deployTestReadToken"
POLICY = Path(__file__).parents[3] / "trainer" / "policies" / "wordle-tiny"


@dataclass(frozen=True)
class Apps:
    """URLs of the two real apps. The replica follows a run that no trainer has begun."""

    env: str
    replica: str


@pytest.fixture(scope="package")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    with _running(tmp_path_factory.mktemp("apps"), {}, {}) as apps:
        yield apps


@contextmanager
def _running(folder: Path, env_settings: dict[str, str], replica_settings: dict[str, str]) -> Iterator[Apps]:
    bucket = folder / "bucket"
    bucket.mkdir()
    replica_settings |= {"REPLICA_BUCKET": bucket.as_uri(), "REPLICA_RUN": "first"}
    replica_settings |= {"REPLICA_FOLDER": str(folder / "replica")}
    env = Space(folder / "env.log", **env_settings)
    replica = Space(folder / "replica.log", app="inference_space", **replica_settings)
    try:
        env.wait()
        replica.wait()
        yield Apps(env.url, replica.url)
    finally:
        env.stop()
        replica.stop()


class World:
    """One owner's place on the simulated Hub, with the command line as its user meets it."""

    def __init__(self, hub: HubSim, apps: Apps, folder: Path) -> None:
        self.hub = hub
        self.apps = apps
        self.folder = folder
        self.name = f"w{uuid4().hex[:8]}"
        self.said = ""  # by all commands so far

    @property
    def env(self) -> str:
        return f"{OWNER}/{self.name}-env"

    def replica(self, number: int = 1) -> str:
        return f"{OWNER}/{self.name}-replica-{number}"

    def run(self, command: str, *options: str) -> tuple[int, str]:
        """Exit status and output of one command, with the apps behind whatever Spaces it makes."""
        status = 0
        out = io.StringIO()
        owner = ["--owner", OWNER] if "--owner" not in options else []
        self.name_hosts()
        with redirect_stdout(out), redirect_stderr(out):
            try:
                main([command, *options, *owner, "--name", self.name])
            except SystemExit as end:
                status = 1 if end.code else 0
                out.write(f"{end.code}\n" if isinstance(end.code, str) else "")
        self.said += out.getvalue()
        return status, out.getvalue()

    def name_hosts(self) -> None:
        """Let the Hub name the real apps as the Spaces' addresses."""
        self.hub.set_space(self.env, host=self.apps.env)
        for number in (1, 2, 3):
            self.hub.set_space(self.replica(number), host=self.apps.replica)

    def up(self, *options: str) -> str:
        """A successful `up`."""
        status, out = self.run("up", *options)
        assert status == 0, out
        return out

    def fails(self, command: str, *options: str) -> str:
        """What a command says that has to fail."""
        status, out = self.run(command, *options)
        assert status == 1, out
        return out

    def changes(self) -> list[str]:
        """Every request so far that may have changed something."""
        reading = re.compile(r"(GET|HEAD) |POST \S*/(validate-yaml|paths-info|preupload)")
        return [request for request in self.hub.requests() if not reading.match(request)]

    def key(self) -> str:
        file = self.folder / ".deploy" / OWNER / "env"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        return file.read_text().removeprefix("SPACE_KEY=").strip()


@pytest.fixture
def clock() -> SimpleNamespace:
    """In place of the module `time`: nobody sleeps, and only sleeping takes time."""
    slept = [0.0]
    return SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)


@pytest.fixture
def world(
    hub: HubSim, hub_env: None, apps: Apps, clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    hub.add_token(WRITE, user=OWNER)
    hub.add_token(READ, user=OWNER, role="read")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    monkeypatch.setenv("SPACE_HF_TOKEN", READ)
    monkeypatch.setenv("SPACE_KEY", "")  # `up` sets it for its own process, and which Spaces get it
    monkeypatch.setenv("SPACES", "")
    monkeypatch.setattr(deploy_hub, "time", clock)
    world = World(hub, apps, tmp_path)
    yield world
    hub.clear()
    api = HfApi(endpoint=hub.url, token=WRITE)
    for space in list(api.list_spaces(author=OWNER)):
        api.delete_repo(space.id, repo_type="space")  # the simulator has few addresses for their apps
    files = [*tmp_path.glob(".deploy/*/env"), *tmp_path.glob("**/*.env")]
    made = re.findall(r"(?:^SPACE_KEY=|_secret_)(\S+)", "\n".join(file.read_text() for file in files), re.M)
    secrets = [WRITE, READ, *made]
    assert not [secret for secret in secrets if secret in world.said], "a secret was printed"
    assert not [line for line in hub.requests() for secret in secrets if secret in line], "a secret in a URL"


@pytest.fixture
def api(hub: HubSim) -> HfApi:
    """The owner, by hand."""
    hub.add_token(WRITE, user=OWNER)
    return HfApi(endpoint=hub.url, token=WRITE)


@pytest.fixture(scope="package")
def keyed_apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    """Apps that want the key `KEY`."""
    with _running(tmp_path_factory.mktemp("keyed"), {"WORDLE_KEY": KEY}, {"REPLICA_KEY": KEY}) as apps:
        yield apps


@pytest.fixture
def server() -> Callable[[dict[str, Any]], AbstractContextManager[str]]:
    """A Space in a state which the real app cannot be brought into: starts it, gives its URL.

    Answers each path by its script: a status, a JSON object, or a list of them whose last one stays.
    """

    def start(script: dict[str, Any]) -> AbstractContextManager[str]:
        def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
            found = script.get(request.path.split("?")[0].replace("//", "/"), 404)
            if isinstance(found, list):
                found = found.pop(0) if len(found) > 1 else found[0]
            return (found, {}, b"<html>") if isinstance(found, int) else (200, {}, json.dumps(found).encode())

        return answering(answer)

    return start
