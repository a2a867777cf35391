"""The exported folder shows the same views from `file://`, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from delta_weight_sync.store import Bucket
from delta_weight_sync.util import count_text, size_text
from inference_space.dashboard.export import export

if TYPE_CHECKING:
    from tests.support.real_run import RealRun


@pytest.mark.full
def test_a_folder_shows_the_run_without_a_server(
    page: Page, tmp_path: Path, real: RealRun, bucket: Bucket
) -> None:
    real.end()
    bucket.delete([real.reader.manifest(1).deltas[-1].key])  # as if it had been cleaned up
    index = export(bucket, None, tmp_path / "site")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(index.as_uri())
    newest = real.reader.manifest()
    expect(page.locator("#dws-live h1")).to_have_text("v3 serving on 1/1 replica")
    expect(page.locator("#dws-live .done")).to_contain_text(
        ["training ended", f"exactly the published bits {newest.digest}"]
    )

    page.get_by_label("Look back").focus()
    page.keyboard.press("Home")
    expect(page.locator("#dws-past h1")).to_have_text("v0 serving on 1/1 replica")
    page.keyboard.press("ArrowRight")
    past = page.locator("#dws-past")
    expect(past.locator("h1")).to_have_text("v1 serving on 1/1 replica")
    expect(past).to_contain_text(f"yes {real.reader.manifest(1).digest}")

    page.locator("[data-tab=inside]").click()
    expect(page.locator(".view-inside")).to_contain_text(
        f"v2 → v3: {count_text(newest.changed)} weights changed"
    )
    page.get_by_label("Version").focus()
    page.keyboard.press("Home")
    expect(page.locator(".view-inside")).to_contain_text("v1 → v2")
    page.locator("[data-tab=bucket]").click()
    page.locator("[data-delta='2']").click()
    expect(page.locator(".opened")).to_contain_text(size_text(real.reader.manifest(2).deltas[-1].size))
    expect(page.locator(".view-bucket a")).to_have_count(0)
    page.locator("[data-tab=explain]").click()
    expect(page.locator(".whose button").first).to_have_text("this run: tiny-qwen")
    assert {urlsplit(one).scheme for one in asked} <= {"file", "blob"}
