"""The simulated Hub's Spaces, through the real client: what `trainer.deploy` relies on in its own tests."""

import os
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import time
from uuid import uuid4

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from tests.support.hubsim import HubSim

FILES = {
    "README.md": b"---\ntitle: Wordle\nsdk: docker\napp_port: 7860\n---\n",
    "Dockerfile": b"FROM python:3.11\n",
    "shared/codec.py": b"print(1)\n",
    "words.bin": os.urandom(100_000),
}


@pytest.fixture
def api(hub: HubSim, hub_env: None) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_write")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is uploaded: text, and something binary that goes to the Xet storage."""
    for name, content in FILES.items():
        (tmp_path / "space" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "space" / name).write_bytes(content)
    return tmp_path / "space"


@pytest.fixture
def space(api: HfApi) -> Iterator[str]:
    """A private Docker Space without an app yet."""
    name = f"team/{uuid4().hex}"
    api.create_repo(name, repo_type="space", space_sdk="docker", private=True)
    yield name
    api.delete_repo(name, repo_type="space", missing_ok=True)


@pytest.fixture
def running(api: HfApi, space: str, folder: Path) -> str:
    """The same, built and running."""
    api.upload_folder(repo_id=space, folder_path=folder, repo_type="space")
    assert api.wait_for_space(space, poll_interval=0.01).stage == "RUNNING"
    return space


@pytest.fixture
def app() -> Iterator[str]:
    """The URL of a process that answers every request with its path and one of its headers."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"%s %s %s" % (self.path.encode(), self.headers["X-Space-Key"].encode(), body))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def visit(api: HfApi, space: str, token: str | None = "hf_read") -> httpx.Response:
    headers = {"X-Space-Key": "k"} | ({"Authorization": f"Bearer {token}"} if token else {})
    with httpx.Client(trust_env=False) as client:
        return client.post(f"{api.space_info(space).host}/a%20b?c=d", content=b"hello", headers=headers)


def test_a_space_goes_through_its_stages(api: HfApi, space: str, folder: Path) -> None:
    assert api.get_space_runtime(space).stage == "NO_APP_FILE"
    api.upload_folder(repo_id=space, folder_path=folder, repo_type="space")
    stages = [api.get_space_runtime(space).stage for _ in range(4)]
    assert stages == ["BUILDING", "APP_STARTING", "RUNNING", "RUNNING"]
    assert api.pause_space(space).stage == "PAUSED"
    assert api.restart_space(space).stage == "APP_STARTING"
    assert api.restart_space(space, factory_reboot=True).stage == "BUILDING"


def test_settings_start_a_running_space_again(api: HfApi, running: str) -> None:
    api.add_space_variable(running, "MODEL", "tiny")
    assert api.wait_for_space(running, poll_interval=0.01).stage == "RUNNING"
    api.add_space_secret(running, "KEY", "s3cret", description="ours")
    assert api.get_space_runtime(running).stage == "APP_STARTING"
    assert {name: one.value for name, one in api.get_space_variables(running).items()} == {"MODEL": "tiny"}
    assert {name: one.description for name, one in api.get_space_secrets(running).items()} == {"KEY": "ours"}
    api.add_space_secret(running, "MODEL", "collides")
    assert api.get_space_runtime(running).raw["errorMessage"] == "Collision on variables and secrets names"


@pytest.mark.parametrize(
    ("token", "owner", "hardware", "status", "words"),
    [
        ("hf_read", "team", None, 403, "don't have the rights to create a space"),
        ("hf_bucket", "team", None, 403, "don't have the rights to create a space"),
        ("hf_team", "user", None, 403, "don't have the rights to create a space"),
        ("hf_write", "free", None, 403, "don't have the rights to create a space"),
        ("hf_free", "free", None, 402, "requires a PRO subscription"),
        ("hf_free", "free", "l4x1", 403, "add a payment method"),
        ("hf_expired", "user", None, 401, "Invalid credentials in Authorization header"),
        (False, "user", None, 401, "Invalid username or password"),
    ],
)
def test_who_may_not_make_a_space_is_told_why(
    api: HfApi, token: str | bool, owner: str, hardware: str | None, status: int, words: str
) -> None:
    how = {"repo_type": "space", "space_sdk": "docker", "space_hardware": hardware, "token": token}
    with pytest.raises(HfHubHTTPError, match=words) as caught:
        api.create_repo(f"{owner}/{uuid4().hex}", **how)
    assert caught.value.response.status_code == status


def test_nobody_else_sees_a_private_space(api: HfApi, running: str) -> None:
    assert running in {space.id for space in api.list_spaces(author="team", token="hf_read")}
    assert running not in {space.id for space in api.list_spaces(author="team", token="hf_free")}
    with pytest.raises(RepositoryNotFoundError):
        api.space_info(running, token="hf_free")
    assert visit(api, running, "hf_free").status_code == visit(api, running, None).status_code == 404
    api.update_repo_settings(running, visibility="public", repo_type="space")
    assert not api.space_info(running, token="hf_free").private


def test_a_running_space_is_served_by_the_process_behind_it(
    api: HfApi, hub: HubSim, running: str, app: str
) -> None:
    hub.set_space(running, upstream=app)
    assert visit(api, running).text == "/a%20b?c=d k hello"
    api.pause_space(running)
    assert visit(api, running).status_code == 503


def test_a_visit_wakes_a_sleeping_space(api: HfApi, hub: HubSim, running: str, app: str) -> None:
    hub.set_space(running, upstream=app, stage="SLEEPING")
    assert api.get_space_runtime(running).stage == "SLEEPING"
    assert [visit(api, running).status_code for _ in range(3)] == [503, 503, 200]
    assert f"POST {running}:/a b" in hub.requests()


@pytest.mark.parametrize("stage", ["BUILD_ERROR", "RUNTIME_ERROR"])
def test_a_build_fails_as_planned_until_it_is_planned_otherwise(
    api: HfApi, hub: HubSim, space: str, folder: Path, stage: str
) -> None:
    hub.set_space(space, builds=["BUILDING", stage], error="exit code 1")
    api.upload_folder(repo_id=space, folder_path=folder, repo_type="space")
    failed = api.wait_for_space(space, poll_interval=0.01)
    assert (failed.stage, failed.raw["errorMessage"]) == (stage, "exit code 1")
    hub.set_space(space, builds=["BUILDING", "APP_STARTING", "RUNNING"])
    api.restart_space(space)
    assert api.wait_for_space(space, poll_interval=0.01).stage == "RUNNING"


def test_a_readme_that_the_hub_would_refuse_is_refused(api: HfApi, space: str, folder: Path) -> None:
    (folder / "README.md").write_text("---\ntitle: x\nsdk: docker\ncolorFrom: teal\n---\n")
    with pytest.raises(ValueError, match='"colorFrom" must be one of'):
        api.upload_folder(repo_id=space, folder_path=folder, repo_type="space")


def test_logs_are_read(api: HfApi, hub: HubSim, running: str) -> None:
    (queued,) = api.fetch_space_logs(running, build=True)
    assert "Build Queued" in queued
    hub.log(running, "replica at version 3")
    startup, line = api.fetch_space_logs(running)
    assert "Application Startup" in startup
    assert line == "replica at version 3\n"


def test_a_gated_model_is_open_to_whom_its_owner_lets_in(api: HfApi, hub: HubSim, tmp_path: Path) -> None:
    hub.add_model("meta/llama", gated="manual", granted=["free"], files={"config.json": "{}"})
    assert api.model_info("meta/llama").gated == "manual"
    with pytest.raises(GatedRepoError) as caught:
        api.hf_hub_download("meta/llama", "config.json", cache_dir=tmp_path)
    assert caught.value.response.status_code == 403
    with pytest.raises(GatedRepoError):
        api.auth_check("meta/llama")
    path = api.hf_hub_download("meta/llama", "config.json", cache_dir=tmp_path, token="hf_free")
    assert Path(path).read_text() == "{}"


def test_spaces_fail_on_demand_and_the_clock_is_wrong_on_demand(
    api: HfApi, hub: HubSim, running: str
) -> None:
    hub.fault("GET .*/runtime", status=500, times=1)
    with pytest.raises(HfHubHTTPError, match="500"):
        api.get_space_runtime(running)
    hub.skew(-3600)
    api.add_space_variable(running, "WHEN", "now")
    told = parsedate_to_datetime(httpx.get(f"{hub.url}/api/whoami-v2", trust_env=False).headers["Date"])
    for moment in (told, api.get_space_variables(running)["WHEN"].updated_at):
        assert 3590 < time() - moment.timestamp() < 3700
