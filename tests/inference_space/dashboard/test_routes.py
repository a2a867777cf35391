"""The dashboard as part of an app, and its command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import mount
from inference_space.dashboard.__main__ import main
from tests.browser import PATIENCE_S


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "well"

    @app.post("/v1/chat/completions")
    def complete() -> str:
        return "done"

    async def mounted() -> FastAPI:  # outside of a loop Gradio makes its own and leaves them open
        return mount(app, open_bucket(f"file://{tmp_path}", create=True), None)

    return asyncio.run(mounted())


def ask(app: FastAPI, *paths: str, method: str = "GET", **content) -> list[httpx.Response]:
    """Answers to requests at the same time."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            return await asyncio.gather(*(client.request(method, path, **content) for path in paths))

    return asyncio.run(send())


def test_routes_of_the_app_are_not_swallowed(app: FastAPI) -> None:
    page, health = ask(app, "/", "/health")
    assert health.json() == "well"
    assert "Delta Weight Sync" in page.text
    assert ask(app, "/v1/chat/completions", method="POST")[0].json() == "done"


def test_visitors_can_only_look(app: FastAPI) -> None:
    assert ask(app, "/gradio_api/info")[0].json() == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert ask(app, "/pause", method="POST")[0].status_code in (404, 405)
    upload = {"files": b"more than one byte"}
    assert ask(app, "/gradio_api/upload", method="POST", files=upload)[0].status_code == 413


@pytest.mark.full
def test_the_command_says_where_it_serves_the_bucket_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket.url]
    environ = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdout
        try:
            page = httpx.get(server.stdout.readline().strip(), timeout=PATIENCE_S)
        finally:
            server.terminate()
    assert "Waiting for a trainer to publish the first version" in page.text
    assert server.returncode == 128 + signal.SIGTERM
    assert list(temporary.glob("delta-weight-sync*")) == []


def test_a_url_that_is_no_bucket_ends_the_command_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dashboard", "--bucket", "ftp://somewhere"])
    with pytest.raises(SystemExit):
        main()
    assert "hf://buckets/<owner>/<name>" in capsys.readouterr().err
