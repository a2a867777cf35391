"""The first paint: what a visitor sees before any script has run, and how the page takes over from it."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Browser, Page, expect

from inference_space.dashboard.prerender import put_into
from tests.browser import PATIENCE_S
from tests.dashboard.real_run import RealRun, Shown

pytestmark = pytest.mark.full


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


def test_the_page_takes_its_place(page: Page, url: str, real: RealRun, shown: Shown) -> None:
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


def test_another_view_is_opened_without_a_glimpse_of_the_run(
    page: Page, url: str, real: RealRun, shown: Shown
) -> None:
    shown(real)
    page.goto(f"{url}#bucket")
    expect(page.locator(".view-bucket .lead")).to_contain_text(f"of run {real.reader.keys.run}")
    expect(page.locator("#dws")).to_have_count(1)
    expect(page.locator("#dws-live h1")).to_be_hidden()


def test_it_is_sent_small_to_whoever_can_unpack_it(url: str) -> None:
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
        put_into("<html><body><gradio-next></gradio-next></body></html>", "")
