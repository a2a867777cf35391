"""One Chromium and one dashboard for all tests of the page; each test begins with an empty bucket."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from shared.bucket import Bucket
from shared.buckets import open_bucket
from tests.dashboard.real_run import RealRun
from tests.dashboard.written_run import WrittenRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard") / "bucket"


@pytest.fixture(scope="package")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", f"file://{folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
def bucket(folder: Path) -> Bucket:
    shutil.rmtree(folder, ignore_errors=True)
    return open_bucket(f"file://{folder}", create=True)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A desktop page; a script error or a browser dialog on it fails the test."""
    faults: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        yield page
    assert faults == []


@pytest.fixture
def run(bucket: Bucket) -> Iterator[WrittenRun]:
    run = WrittenRun(bucket)
    yield run
    run.log.close()


@pytest.fixture
def real(bucket: Bucket) -> Iterator[RealRun]:
    """A run by the real publisher, at version 3."""
    real = RealRun(bucket, run=f"real-{uuid4().hex[:6]}")
    for reward in (0.2, 0.4, 0.6):
        real.step(reward)
    yield real
    real.close()
