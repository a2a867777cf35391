"""Photographs a run: `python -m docs.screenshots --bucket URL --out docs`.

Desktop and phone, light and dark, made small by 128 colours; `dashboard.png` is in the quickstart.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.store import open_bucket
from tests.support.browser import chromium
from tests.support.dashboard import RecordedControls, dashboard

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
READY = {"run": "#dws-live figure", "inside": ".heat", "bucket": ".opened", "explain": ".scene"}
OWNER = {"owner": ".view-owner ul"}
TALLEST = {"run": 5400, "inside": 1400, "bucket": 1400, "explain": 4600, "owner": 900}  # pixels of a picture


LOOKS = [(device, scheme) for device in SIZES for scheme in ("light", "dark")]


def main() -> None:
    """Serve the run, photograph it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        with _serving(arguments.bucket) as url:
            for look in LOOKS:
                _photograph(browser, url, arguments.out, look, READY)
        with dashboard(open_bucket(arguments.bucket), RecordedControls()) as url:
            for look in LOOKS:
                _photograph(browser, url, arguments.out, look, OWNER)


@contextmanager
def _serving(bucket: str) -> Iterator[str]:
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def _photograph(browser: Browser, url: str, out: Path, look: tuple[str, str], views: dict[str, str]) -> None:
    device, scheme = look
    width, height = SIZES[device]
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#dws-live figure").first).to_be_visible()
        if look == LOOKS[0] and "run" in views:
            _keep(page.screenshot(), height, out / "dashboard.png")
        for view, ready in views.items():
            open_view(page, view, ready)
            if view == "explain":  # each animation plays while it is in sight: let it come to something
                for scene in page.locator(".scene").all():
                    scene.scroll_into_view_if_needed()
                    page.wait_for_timeout(4000)
            page.evaluate("scrollTo(0, 0)")
            path = out / f"dashboard-{view}-{device}-{scheme}.png"
            _keep(page.screenshot(full_page=True), TALLEST[view], path)


def open_view(page: Page, view: str, ready: str) -> None:
    page.locator(f"[data-tab={view}]").click()
    if view == "bucket":
        page.locator("[data-delta]").first.click()
    expect(page.locator(ready).first).to_be_visible()


def _keep(png: bytes, tallest: int, path: Path) -> None:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.crop((0, 0, picture.width, min(picture.height, tallest)))
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
