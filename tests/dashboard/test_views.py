"""Inside a delta, the bucket browser and the scrubber, on a run by the real publisher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from delta_weight_sync.keys import Writer
from delta_weight_sync.units import count_text, size_text
from tests.browser import PATIENCE_S
from tests.dashboard.real_run import KINDS, games

if TYPE_CHECKING:
    from delta_weight_sync.store import Bucket
    from tests.dashboard.real_run import RealRun, Shown

pytestmark = pytest.mark.full


def test_the_page_of_a_real_run_shows_what_was_published(
    page: Page, url: str, real: RealRun, shown: Shown
) -> None:
    real.step(0.8, games())
    shown(real)
    manifest = real.reader.at()
    page.goto(url)
    live = page.locator("#dws-live")
    expect(live.locator("h1")).to_have_text("v4 serving on 1/1 replica")
    payloads = sorted(m.deltas[-1].size for m in real.reader.history() if m.version)
    expect(live.locator(".lead")).to_contain_text(f"{size_text((payloads[1] + payloads[2]) / 2)} per sync")
    expect(live.locator("tbody").first).to_contain_text(f"yes {manifest.digest}")
    expect(live.locator(".clock li[title]")).to_have_count(4)
    solved, unsolved, invalid, hostile = live.locator(".boards li").all()
    expect(solved.locator(".board > *")).to_have_count(3)
    expect(solved.locator(".tiles").last.locator(".hit")).to_have_count(5)
    assert solved.locator(".tiles").first.inner_text().lower().split() == list("crane")
    expect(unsolved.locator("strong")).to_have_text("0.40")
    expect(invalid).to_contain_text("not a word")
    expect(hostile).to_contain_text("<img src=x onerror=alert(1)>")
    assert live.locator("img").count() == 0


def test_inside_a_delta_of_any_version(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    shown(real)
    page.goto(f"{url}#inside")
    inside = page.locator(".view-inside")
    expect(inside.locator(".heat tbody tr")).to_have_count(len(KINDS))
    assert inside.locator(".heat thead th").all_inner_texts() == ["layer", "0", "1", "2", "3"]
    newest = real.reader.at(3)
    expect(inside).to_contain_text(f"v2 → v3: {count_text(newest.changed)} weights changed in 21 tensors")
    shares = [float(share[:-2]) for share in inside.locator(".bars em").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    inside.get_by_label("Version").focus()
    page.keyboard.press("Home")
    expect(inside).to_contain_text(f"v0 → v1: {count_text(real.reader.at(1).changed)} weights changed")


def test_a_delta_is_opened_in_place_and_proven(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    shown(real)
    manifest = real.reader.at(3)
    page.goto(f"{url}#bucket")
    bucket = page.locator(".view-bucket")
    row = bucket.locator("tr", has_text="deltas/00000003.t1-")
    expect(row).to_contain_text(size_text(manifest.deltas[-1].size))
    row.get_by_role("button", name="Open").click()
    expect(bucket.locator(".opened tbody tr")).to_have_count(21)
    expect(bucket.locator(".opened > p").first).to_contain_text(f"{count_text(manifest.changed)} of")
    bucket.get_by_role("button", name="Verify v3").click()
    expect(bucket.locator("output")).to_contain_text("verified: v3 was rebuilt from anchor v0 and 3 deltas")
    expect(bucket.locator("output")).to_contain_text(manifest.digest)
    row.get_by_role("button", name="Close").click()
    expect(bucket.locator(".opened")).to_have_count(0)


def test_a_download_is_the_object_and_nothing_else_can_be_had(
    url: str, real: RealRun, bucket: Bucket, shown: Shown
) -> None:
    shown(real)
    ref = real.reader.at(3).deltas[-1]
    answer = httpx.get(f"{url}dashboard/object", params={"key": ref.key}, timeout=PATIENCE_S)
    ref.check(answer.content)
    anchor = real.reader.at(3).anchor.files[0].key
    for key in (anchor, "runs/other/run.json", "../../etc/passwd", f"{ref.key}/../../run.json"):
        refused = httpx.get(f"{url}dashboard/object", params={"key": key}, timeout=PATIENCE_S)
        assert refused.status_code == 404
        assert "can be downloaded here" in refused.text


def test_a_damaged_delta_is_named_by_verify(url: str, real: RealRun, bucket: Bucket, shown: Shown) -> None:
    shown(real)
    key = real.reader.at(2).deltas[-1].key
    data = bytearray(bucket.get(key))
    data[-1] ^= 1
    bucket.put(key, bytes(data))
    answer = httpx.get(f"{url}dashboard/verify", params={"version": 3}, timeout=PATIENCE_S)
    assert answer.status_code == 404
    assert f"{key} is not the published object" in answer.text


def test_a_half_written_version_is_no_version_yet(
    page: Page, url: str, real: RealRun, bucket: Bucket, shown: Shown
) -> None:
    shown(real)
    bucket.put(real.reader.keys.delta(4, Writer(1, "0" * 32)), b"half of a delta")
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v3 serving on 1/1 replica")
    page.locator("[data-tab=bucket]").click()
    page.locator("[data-delta='4']").click()
    expect(page.get_by_role("alert")).to_contain_text("has no version 4")


def test_scrubbing_shows_the_run_as_it_was(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    real.step(0.9)
    shown(real)
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v4 serving on 1/1 replica")
    slider = page.get_by_label("Look back")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    past = page.locator("#dws-past")
    expect(past.locator("h1")).to_have_text("v2 serving on 1/1 replica")
    expect(page.locator("#dws-live")).to_be_hidden()
    payload = size_text(real.reader.at(2).deltas[-1].size)
    assert payload in past.locator("tr", has=page.get_by_text("v2", exact=True)).last.inner_text()
    real.step(0.9)
    page.get_by_role("button", name="Newest").click()
    expect(page.locator("#dws-live h1")).to_have_text("v5 serving on 1/1 replica")


def test_an_open_view_turns_to_the_run_that_takes_the_place_of_another(
    page: Page, url: str, real: RealRun, bucket: Bucket, shown: Shown
) -> None:
    """Nobody has to reload: a page left open in another view shows what is there now."""
    shown(real)
    page.goto(f"{url}#explain")
    expect(page.locator(".whose button").first).to_have_text("this run: tiny-qwen")
    page.locator("[data-tab=bucket]").click()
    expect(page.locator(".view-bucket .lead")).to_contain_text(f"of run {real.reader.keys.run}")
    bucket.delete([info.key for info in bucket.list("runs/")])
    expect(page.locator(".view-bucket [role=alert]")).to_contain_text("holds no run yet")
    page.locator("[data-tab=explain]").click()
    expect(page.locator(".whose button").first).to_have_text("an example: Qwen3-0.6B")
