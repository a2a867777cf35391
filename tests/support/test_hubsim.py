"""The simulated Hub's Spaces, through the real client: what `trainer.deploy` relies on in its own tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

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


def visit(api: HfApi, space: str, token: str | None = "hf_read") -> httpx.Response:
    headers = {"X-Space-Key": "k"} | ({"Authorization": f"Bearer {token}"} if token else {})
    with httpx.Client(trust_env=False) as client:
        return client.post(f"{api.space_info(space).host}/a%20b?c=d", content=b"hello", headers=headers)


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
def test_who_may_not_make_a_space_is_told_why(api, token, owner, hardware, status, words):
    how = {"repo_type": "space", "space_sdk": "docker", "space_hardware": hardware, "token": token}
    with pytest.raises(HfHubHTTPError, match=words) as caught:
        api.create_repo(f"{owner}/{uuid4().hex}", **how)
    assert caught.value.response.status_code == status


def test_nobody_else_sees_a_private_space(api, running):
    assert running in {space.id for space in api.list_spaces(author="team", token="hf_read")}
    assert running not in {space.id for space in api.list_spaces(author="team", token="hf_free")}
    with pytest.raises(RepositoryNotFoundError):
        api.space_info(running, token="hf_free")
    assert visit(api, running, "hf_free").status_code == visit(api, running, None).status_code == 404
    api.update_repo_settings(running, visibility="public", repo_type="space")
    assert not api.space_info(running, token="hf_free").private


def test_a_readme_that_the_hub_would_refuse_is_refused(api, space, folder):
    (folder / "README.md").write_text("---\ntitle: x\nsdk: docker\ncolorFrom: teal\n---\n")
    with pytest.raises(ValueError, match='"colorFrom" must be one of'):
        api.upload_folder(repo_id=space, folder_path=folder, repo_type="space")


def test_the_storage_refuses_what_was_not_granted(hub, hub_env):
    """As xet-core's pages say: a block needs a grant, its headers and its length, and a commit its data."""
    right = {"Authorization": "Bearer xet-write"}
    with httpx.Client(base_url=f"{hub.url}/cas/v1", trust_env=False) as client:
        asked = f"/xorb-grants/default/{uuid4().hex}", {"length": 3}
        assert client.post(asked[0], json=asked[1]).status_code == 401
        grant = client.post(asked[0], json=asked[1], headers=right).json()
        commit = f"{asked[0].replace('grants', 'commits')}/grant/{grant['id']}"
        assert client.put(grant["url"], content=b"abc").status_code == 403
        assert client.put(grant["url"], content=b"abc", headers=grant["headers"] | right).status_code == 403
        assert client.put(grant["url"], content=b"abcd", headers=grant["headers"]).status_code == 400
        assert client.post(commit, headers=right).status_code == 404
