"""The first paint: what a visitor sees before any script has run, and how the page takes over from it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import routes
from inference_space.dashboard.data import RunView
from inference_space.dashboard.page import insert
from tests.browser import PATIENCE_S
from tests.inference_space.dashboard.test_routes import ask
from tests.support.real_run import RealRun, Shown


@pytest.mark.full
def test_the_answer_itself_shows_the_run_without_any_script(
    browser: Browser, url: str, real: RealRun, shown: Shown
) -> None:
    shown(real)
    with browser.new_context(java_script_enabled=False, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#dws.first h1")).to_have_text("v3 serving on 1/1 replica")
        expect(page.locator("#dws.first dl")).to_contain_text("Per sync")
        expect(page.locator("#dws.first figure")).to_have_count(9)
        columns = page.locator("#dws.first .panels").evaluate("e => getComputedStyle(e).gridTemplateColumns")
        assert len(columns.split()) == 3, "the style sheets came with it"


@pytest.mark.full
def test_the_page_replaces_the_first_paint(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    shown(real)
    page.add_init_script(_WATCH)
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v3 serving on 1/1 replica")
    expect(page.locator("#dws")).to_have_count(1)
    expect(page.get_by_label("Look back")).to_be_visible()
    assert page.evaluate("window.blank") is False, "there was no moment without a headline"


_WATCH = """window.blank = false
let seen = false
new MutationObserver(() => {
  const there = Boolean(document.querySelector("#dws h1"))
  window.blank ||= seen && !there
  seen ||= there
}).observe(document, { childList: true, subtree: true })"""


@pytest.mark.full
def test_another_view_opens_without_a_flash_of_the_run(
    page: Page, url: str, real: RealRun, shown: Shown
) -> None:
    shown(real)
    page.goto(f"{url}#bucket")
    expect(page.locator(".view-bucket .lead")).to_contain_text(f"of run {real.reader.keys.run}")
    expect(page.locator("#dws")).to_have_count(1)
    expect(page.locator("#dws-live h1")).to_be_hidden()


@pytest.mark.full
def test_it_is_compressed_for_clients_that_accept_it(url: str) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        packed = client.get(url, headers={"accept-encoding": "gzip"})
        plain = client.get(url, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert 2 * int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    for answer in (packed, plain):
        assert '<main id="dws" class="first">' in answer.text
        assert "accept-encoding" in answer.headers["vary"].lower()


def test_another_gradio_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"use gradio==6\.31\.0"):
        insert("<html><body><gradio-next></gradio-next></body></html>", "")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FastAPI, list[RunView]]:
    """The dashboard's app, and the views of which a page was made."""
    views, paint = list[RunView](), routes.first_paint
    monkeypatch.setattr(routes, "first_paint", lambda view, **more: views.append(view) or paint(view, **more))

    async def app() -> FastAPI:  # outside of a loop Gradio makes its own and leaves them open
        return routes.mount(FastAPI(), open_bucket(f"file://{tmp_path}", create=True), None)

    return asyncio.run(app()), views


@pytest.mark.finding(7)
def test_a_page_is_rendered_once_for_all_viewers(made: tuple[FastAPI, list[RunView]]) -> None:
    app, views = made
    pages = [
        page for name in ("replica", "evil.example") for page in ask(app, *["/"] * 40, headers={"Host": name})
    ]
    assert len({page.content for page in pages}) <= len(views)
    assert len(views) == len({view.revision for view in views}), "a page for a view, not for a visitor"
    assert len(views) < 10
    assert "evil.example" not in pages[-1].text
    assert re.search(r'"root":\s*location\.origin', pages[0].text), "a page finds its server by itself"
    assert ".invalid" not in pages[0].text
