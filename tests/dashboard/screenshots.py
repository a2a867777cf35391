"""`python -m tests.dashboard.screenshots --bucket URL --out docs`: pictures of every view of a run.

Desktop and phone, light and dark, made small by 96 colours; `dashboard.png` opens the README.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.dashboard.conftest import FLAGS

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
READY = {"run": "#dws-live figure", "inside": ".heat", "bucket": ".opened", "explain": ".scene"}
TALLEST = {"run": 5400, "inside": 1400, "bucket": 1400, "explain": 4600}  # pixels of a picture


def main() -> None:
    """Serve the run, photograph it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with _serving(arguments.bucket) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS.split())
        for device, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                _photograph(browser, url, arguments.out, device, scheme, width, height)
        browser.close()


@contextmanager
def _serving(bucket: str) -> Iterator[str]:
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        yield server.stdout.readline().strip()
        server.terminate()


def _photograph(
    browser: Browser, url: str, out: Path, device: str, scheme: str, width: int, height: int
) -> None:
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator(READY["run"]).first).to_be_visible(timeout=30_000)
        if (device, scheme) == ("desktop", "light"):
            _keep(page.screenshot(), height, out / "dashboard.png")
        for view in READY:
            _open(page, view)
            path = out / f"dashboard-{view}-{device}-{scheme}.png"
            _keep(page.screenshot(full_page=True), TALLEST[view], path)


def _open(page: Page, view: str) -> None:
    page.locator(f"[data-tab={view}]").click()
    if view == "bucket":
        page.locator("[data-delta]").first.click()
    expect(page.locator(READY[view]).first).to_be_visible()
    if view == "explain":  # each animation plays while it is in sight: let it come to something
        for scene in page.locator(".scene").all():
            scene.scroll_into_view_if_needed()
            page.wait_for_timeout(4000)
    page.evaluate("scrollTo(0, 0)")


def _keep(png: bytes, tallest: int, path: Path) -> None:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.crop((0, 0, picture.width, min(picture.height, tallest)))
    picture.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
