"""An accessibility check of every view, desktop and phone, light and dark: axe finds nothing serious."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.store import Bucket
from tests.inference_space.dashboard.screenshots import READY, open_view
from tests.support.dashboard import KEY, REFUSED, RecordedControls, controlled
from tests.support.real_run import games

if TYPE_CHECKING:
    from tests.support.real_run import RealRun, Shown

pytestmark = pytest.mark.long

AXE = "axe-core@4.11.0"


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> Path:
    """axe-core's script, from npm once and then from pytest's cache."""
    folder = pytestconfig.cache.mkdir("axe") / AXE
    script = folder / "package" / "axe.min.js"
    if script.exists():
        return script
    if shutil.which("npm") is None:
        pytest.skip(f"no npm on PATH, so {AXE} cannot be had: apt-get install npm")
    folder.mkdir(exist_ok=True)
    got = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {got.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extract("package/axe.min.js", folder, filter="data")
    return script


DEVICES = [(1280, "light"), (390, "dark")]


@pytest.mark.parametrize(("width", "scheme"), DEVICES)
def test_nothing_serious(
    browser: Browser, url: str, real: RealRun, axe: Path, shown: Shown, width: int, scheme: str
) -> None:
    real.step(0.8, games())
    shown(real)
    with looking(browser, url, width, scheme) as page:
        expect(page.locator("#dws-live .boards")).to_be_visible()
        page.add_script_tag(path=axe)
        for view, there in READY.items():
            open_view(page, view, there)
            assert page.evaluate(_RUN) == [], view


def test_nothing_serious_on_the_owners_tab(browser: Browser, bucket: Bucket, axe: Path) -> None:
    """Once with a refusal on it, once with an answer."""
    (desktop, phone), owner = DEVICES, "#dws-owner-state"
    with controlled(bucket, RecordedControls()) as url:
        for device, key, there in ((desktop, "a guess", REFUSED), (phone, KEY, f"{owner} b:text('paused')")):
            with looking(browser, f"{url}#owner", *device) as page:
                page.add_script_tag(path=axe)
                page.get_by_label("Key").fill(key)
                page.get_by_role("button", name="Pause following").click()
                expect(page.locator(there)).to_be_visible()
                assert page.evaluate(_RUN) == [], there


@contextmanager
def looking(browser: Browser, url: str, width: int, scheme: str) -> Iterator[Page]:
    options = {
        "viewport": {"width": width, "height": 900},
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    with browser.new_context(**options, bypass_csp=True) as context:  # or axe's script could not run
        page = context.new_page()
        page.goto(url)
        yield page


_RUN = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] })
  return found.violations.filter(one => ["serious", "critical"].includes(one.impact))
    .map(one => `${one.id}: ${one.nodes.slice(0, 3).map(node => node.html.slice(0, 160)).join(" | ")}`)
}"""
