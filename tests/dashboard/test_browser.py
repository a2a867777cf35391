"""The page as a visitor's browser shows it, on a bucket that changes meanwhile."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from delta_weight_sync.store import Bucket
from tests.dashboard.written_run import FULL, TOTAL, WrittenRun, digest_of, lifelike

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.full

HOSTILE = "<img src=x onerror=alert(1)> ${alert(2)} {{constructor}} `"


def rows(page: Page, table: int) -> list[list[str]]:
    found = page.locator("#dws-live table").nth(table).locator("tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in found]


def test_the_page_shows_what_is_in_the_bucket_and_moves_by_itself(
    page: Page, url: str, run: WrittenRun
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    run.publish(FULL, TOTAL)
    run.step(1, 0.5)
    run.publish(44_000, 2_200)
    run.commit("near", 1, lag_s=1.5, pause_ms=20)
    run.status("far", 0)
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v1 serving on 1/2 replicas")
    expect(page.locator("#dws-live .lead")).to_have_text(
        "44 KB per sync instead of 440 KB · paused 20 ms (median)"
    )
    far, near = rows(page, 0)
    assert far == ["far", "serving", "v0", "1 version behind", "", f"yes {digest_of(0)}", ""]
    assert near == ["near", "serving", "v1", "current", "1.50 s", f"yes {digest_of(1)}", ""]
    newest, first = rows(page, 1)
    steps = ["12 ms", "31 ms", "420 ms", "900 ms", "300 ms", "14 ms", "20 ms"]
    assert newest == ["v1", "1.00 % 2.2 K", "44 KB", *steps]
    assert first[:3] == ["v0", "all", "440 KB"]

    page.evaluate("document.querySelector('#dws-live h1').kept = true")
    run.publish(22_000, 1_100)
    run.commit("far", 2, lag_s=2.5, pause_ms=30)
    expect(page.locator("#dws-live h1")).to_have_text("v2 serving on 1/2 replicas")
    assert page.evaluate("document.querySelector('#dws-live h1').kept"), (
        "updated in place, so nothing flickers"
    )
    assert {urlsplit(one).hostname for one in asked} == {"127.0.0.1"}, "nothing leaves the machine"


def test_an_empty_then_vanished_then_restored_bucket(
    page: Page, url: str, bucket: Bucket, folder: Path
) -> None:
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_contain_text("Waiting for a trainer to publish the first version")
    expect(page.locator("#dws-live h1")).to_contain_text(bucket.url)
    run = WrittenRun(bucket)
    run.publish(FULL, TOTAL)
    run.log.close()
    expect(page.locator("#dws-live h1")).to_have_text("v0 published, no replica has reported yet")
    folder.rename(folder.with_name("away"))
    expect(page.get_by_role("alert")).to_contain_text("does not exist")
    expect(page.locator("#dws-live header strong")).to_have_text("bucket not readable")
    expect(page.locator("#dws-live h1")).to_contain_text("v0")
    folder.with_name("away").rename(folder)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_words_of_replicas_are_shown_and_never_run(page: Page, url: str, run: WrittenRun) -> None:
    run.publish(FULL, TOTAL)
    run.status(HOSTILE, 0, state=HOSTILE, error=HOSTILE)
    page.goto(url)
    expect(page.locator("#dws-live table")).to_have_count(2)
    (row,) = rows(page, 0)
    assert (row[0], row[1], row[-1]) == (HOSTILE, HOSTILE, HOSTILE)
    assert page.locator("#dws-live img").count() == 0


def test_training_ended_with_the_published_bits(page: Page, url: str, run: WrittenRun) -> None:
    run.publish(FULL, TOTAL)
    run.publish(44_000, 2_200)
    run.end(digest_of(1))
    page.goto(url)
    expect(page.locator("#dws-live header strong")).to_have_text("training ended")
    expect(page.locator("p.done")).to_contain_text(f"exactly the published bits {digest_of(1)}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_sideways_scrolling(
    browser: Browser, url: str, run: WrittenRun, scheme: str
) -> None:
    lifelike(run, 60)
    run.status("replica-1", None, state="down", error="x" * 200)
    with browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#dws-live h1")).to_contain_text("v60 serving on")
        assert page.locator("#dws-live figure svg path").count() > 12
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        ink, paper = (page.evaluate(_BRIGHTNESS, css) for css in ("color", "backgroundColor"))
        assert (ink < 80 < 180 < paper) if scheme == "light" else (paper < 80 < 180 < ink)


_BRIGHTNESS = """css => {
  const value = getComputedStyle(document.querySelector(`#dws-live ${css == 'color' ? 'h1' : 'figure'}`))[css]
  return Math.max(...value.match(/\\d+/g).slice(0, 3).map(Number))
}"""
