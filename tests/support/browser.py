"""One headless Chromium for all tests of pages: the machine's, or one from npm; else they are skipped."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_S = 60  # for what a page comes to show: a loaded machine is slow, and no test is about speed
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
)


def installed() -> str:
    """The Chromium on PATH, or one from npm. Raises `LookupError` if there is neither."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None) or _from_npm(Path(sys.prefix, "chromium"))


def with_node() -> dict[str, str]:
    """This process's environment, with the node and npm of tests/requirements.txt if the machine has none."""
    return os.environ | {"PATH": os.pathsep.join([os.environ["PATH"], str(Path(sys.prefix, "bin"))])}


PACKAGE = "@sparticuz/chromium@153.0.0"  # for Linux on x86-64, with libraries and a font
_INSTALL = "npm install --prefix . --no-audit --no-fund --no-save --loglevel=error --fetch-retries=1"
_UNPACK = """
import chromium, { inflate } from "@sparticuz/chromium"
await inflate("node_modules/@sparticuz/chromium/bin/al2023.tar.br")
await chromium.executablePath()
"""
_FONTS = """<fontconfig>
  <dir>/usr/share/fonts</dir><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
"""
_LAUNCHER = """#!/bin/sh
here=$(dirname "$0")
export LD_LIBRARY_PATH="$here/al2023/lib" FONTCONFIG_FILE="$here/fonts.conf" XDG_CACHE_HOME="$here/cache"
exec "$here/chromium" "$@"
"""


def _from_npm(folder: Path) -> str:
    """Install the package into `folder`, unless that is done, and return the path of its launcher."""
    folder.mkdir(exist_ok=True)
    launcher = folder / "launcher"
    unproven = folder / "unproven"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the suite runs in two processes
        if not launcher.exists():
            (folder / "fonts.conf").write_text(_FONTS)
            unproven.write_text(_LAUNCHER)
            unproven.chmod(0o700)
            _run(folder, *_INSTALL.split(), PACKAGE)
            _run(folder, "node", "--input-type=module", "--eval", _UNPACK)
            _run(folder, str(unproven), "--version")
            shutil.rmtree(folder / "node_modules")
            unproven.rename(launcher)
    return str(launcher)


def _run(folder: Path, *command: str) -> None:
    environment = with_node() | {"TMPDIR": str(folder)}  # where the package unpacks itself
    program = shutil.which(command[0], path=environment["PATH"])
    reason = ""
    if program is None:
        reason = f"there is no {command[0]}"
    else:
        argv = [program, *command[1:]]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = " ".join(done.stderr.split())[:300]
    if reason:
        raise LookupError(f"no Chromium on PATH, and none from npm ({reason}): apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; its pages and what is expected of them get `PATIENCE_S` seconds."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )
    try:
        path = installed()
    except LookupError as reason:
        pytest.skip(str(reason))
    api.expect.set_options(timeout=1000 * PATIENCE_S)
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS.split(), timeout=1000 * PATIENCE_S)
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, **options: object) -> Iterator[Page]:
    """A desktop page. A script error, a browser dialog, or anything that the page's content security policy
    blocks, fails the test."""
    faults: list[str] = []

    def note_blocked(text: str) -> None:
        # Gradio's own scripts ask Google for fonts, and the Hub about the Space; the policy is to block that.
        asked_by_gradio = "https://fonts.g" in text or "https://huggingface.co/api/spaces/" in text
        if "Content Security Policy" in text and not asked_by_gradio:
            faults.append(text)

    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options) as context:
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: note_blocked(message.text))
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
    with watched_page(browser) as page:
        yield page
