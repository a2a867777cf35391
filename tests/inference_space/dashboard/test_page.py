"""The dashboard as part of an app: its first paint, its routes, and its command."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import page as page_module
from inference_space.dashboard.__main__ import main
from inference_space.dashboard.data import RunView
from inference_space.dashboard.page import insert
from tests.browser import PATIENCE_S
from tests.support.dashboard import mounted


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()
    app.get("/health")(lambda: "well")
    app.post("/v1/chat/completions")(lambda: "done")
    return mounted(open_bucket(f"file://{tmp_path}", create=True), app)


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


def test_it_is_compressed_for_clients_that_accept_it(app: FastAPI) -> None:
    (packed,) = ask(app, "/", headers={"accept-encoding": "gzip"})
    (plain,) = ask(app, "/", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert 2 * int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    for answer in (packed, plain):
        assert '<main id="dws" class="first">' in answer.text
        assert "accept-encoding" in answer.headers["vary"].lower()


def test_another_gradio_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"use gradio==6\.31\.0"):
        insert("<html><body><gradio-next></gradio-next></body></html>", "")


@pytest.mark.finding(7)
def test_a_page_is_rendered_once_for_all_viewers(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    views, paint = list[RunView](), page_module.first_paint
    monkeypatch.setattr(
        page_module, "first_paint", lambda view, **more: views.append(view) or paint(view, **more)
    )
    pages = [
        page for name in ("replica", "evil.example") for page in ask(app, *["/"] * 40, headers={"Host": name})
    ]
    assert len({page.content for page in pages}) <= len(views)
    assert len(views) == len({view.revision for view in views}), "a page for a view, not for a visitor"
    assert len(views) < 10
    assert "evil.example" not in pages[-1].text
    assert re.search(r'"root":\s*location\.origin', pages[0].text), "a page finds its server by itself"
    assert ".invalid" not in pages[0].text


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


def test_an_impossible_export_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    monkeypatch.setattr("sys.argv", ["dashboard", "--bucket", bucket.url, "--export", f"{tmp_path}/site"])
    with pytest.raises(SystemExit, match="holds no run yet"):
        main()
    assert not (tmp_path / "site").exists()
