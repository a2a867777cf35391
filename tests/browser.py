"""One headless Chromium for all tests of pages; where there is none, they say so and are skipped."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_S = 60  # for what a page comes to show: a loaded machine is slow, and no test is about speed
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
)


def installed() -> str | None:
    """The browser of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; its pages and what is expected of them get `PATIENCE_S` seconds."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )
    path = installed()
    if path is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    api.expect.set_options(timeout=1000 * PATIENCE_S)
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS.split(), timeout=1000 * PATIENCE_S)
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, **options: object) -> Iterator[Page]:
    """A desktop page; a script error or a browser dialog on it fails the test."""
    faults: list[str] = []
    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options) as context:
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        yield page
    assert not faults, faults


_BRIGHTNESS = """([selector, css]) => {
  const value = getComputedStyle(document.querySelector(selector))[css]
  return Math.max(...value.match(/\\d+/g).slice(0, 3).map(Number))
}"""


def shows_scheme(page: Page, scheme: str, ink: str, paper: str) -> bool:
    """Whether the text of `ink` and the background of `paper` are dark on light, or light on dark."""
    text = page.evaluate(_BRIGHTNESS, [ink, "color"])
    ground = page.evaluate(_BRIGHTNESS, [paper, "backgroundColor"])
    return text < 80 < 180 < ground if scheme == "light" else ground < 80 < 180 < text


@pytest.fixture(scope="session")
def _chromium() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    with chromium() as browser:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield browser, loop
        asyncio._set_running_loop(loop)


@pytest.fixture
def browser(_chromium: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The one browser; what a test leaves open in it is closed.

    Playwright marks its loop as running in this thread for as long as it is there. It is marked only while a
    test has the browser, so that others can use `asyncio.run`.
    """
    browser, loop = _chromium
    asyncio._set_running_loop(loop)
    yield browser
    for context in browser.contexts:
        context.close()
    asyncio._set_running_loop(None)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A desktop page; a script error or a browser dialog on it fails the test."""
    with watched_page(browser) as page:
        yield page
