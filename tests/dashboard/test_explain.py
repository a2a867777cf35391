"""The animations on the page: the run's own numbers, the keyboard, and rest for whoever wants no motion."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.units import size_text
from inference_space.dashboard.facts import EXAMPLE, LINK
from inference_space.dashboard.formatting import duration, percent, plural
from inference_space.dashboard.static_files import STATIC
from tests.browser import PATIENCE_S
from tests.dashboard.test_formulas import Formulas

if TYPE_CHECKING:
    from tests.dashboard.real_run import RealRun, Shown

pytestmark = pytest.mark.full

CURVES = json.loads((STATIC / "study.json").read_text())["curves"]
ENDS = [
    (task.replace("_", "-"), mean(rewards[: len(rewards) // 10]), mean(rewards[-(len(rewards) // 10) :]))
    for task, rewards in json.loads((STATIC / "pretrained.json").read_text()).items()
]
SCENES = ("ship", "rounding", "landing", "sync")


def opened(page: Page, url: str) -> Page:
    page.goto(f"{url}#explain")
    expect(page.locator(".scene")).to_have_count(len(SCENES))
    return page


@pytest.fixture
def empty(bucket: object, shown: Shown) -> None:
    shown(None)


def test_the_numbers_are_the_runs(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    shown(real)
    opened(page, url)
    given = httpx.get(f"{url}dashboard/explain", timeout=PATIENCE_S).json()
    mine = given["facts"][0]
    manifests = [manifest for manifest in real.reader.history() if manifest.version]
    sizes = sorted(manifest.deltas[-1].size for manifest in manifests)
    assert given["measured"] is True
    assert mine["delta_bytes"] == sizes[1], "the median of three"
    assert mine["full_bytes"] == manifests[0].full_bytes
    assert mine["link"] == pytest.approx(LINK * mine["full_bytes"] / EXAMPLE.full_bytes)
    assert mine["changed"] == manifests[0].changed / manifests[0].total
    expect(page.locator("[data-scene=ship] .said")).to_contain_text(f"The {size_text(sizes[1])} that changed")
    expect(page.locator("[data-scene=ship] .said")).to_contain_text(
        f"This small model starts on a small link: {size_text(mine['link'])}/s"
    )
    expect(page.locator("[data-scene=rounding] .tally")).to_contain_text("tiny-qwen changed")


def test_without_a_run_an_example_is_shown_and_its_table_holds(page: Page, url: str, empty: None) -> None:
    opened(page, url)
    expect(page.locator(".whose button")).to_have_text(["an example: Qwen3-0.6B"])
    f, cells = Formulas(page), page.locator("[data-scene=sync] tbody tr td").all_inner_texts()
    whole, through = EXAMPLE.full_bytes / LINK, sum(s for _, s in f.bucket_sync(EXAMPLE, LINK))
    lost = f.stopped_s(EXAMPLE, LINK, 3)
    moved = f.moved_bytes(EXAMPLE, 3)
    assert cells[:2] == [duration(through), duration(whole)]
    assert cells[6:8] == [duration(seconds) for seconds in lost]
    assert cells[8:10] == [size_text(count) for count in moved]


def test_everything_answers_to_the_keyboard(page: Page, url: str, empty: None) -> None:
    opened(page, url)
    sync, landing, rounding = (
        page.locator(f"[data-scene={name}]") for name in ("sync", "landing", "rounding")
    )
    sync.get_by_label("Replicas").focus()
    page.keyboard.press("End")
    expect(sync.locator(".node.replica")).to_have_count(16)
    before = rounding.locator(".slider output").first.inner_text()
    rounding.get_by_label("Learning rate").focus()
    page.keyboard.press("PageUp")
    expect(rounding.locator(".slider output").first).not_to_have_text(before)
    rounding.get_by_role("button", name="One step").focus()
    page.keyboard.press("Enter")
    expect(rounding.locator(".said")).to_contain_text("Step")
    landing.get_by_role("button", name="Next").focus()
    page.keyboard.press("Enter")
    expect(landing.get_by_role("button", name="Play")).to_be_visible()
    told = landing.locator(".said").inner_text()
    page.keyboard.press("Enter")
    expect(landing.locator(".said")).not_to_have_text(told)


def test_where_motion_is_not_wanted_the_end_is_shown_and_nothing_moves(
    browser: Browser, url: str, empty: None
) -> None:
    with browser.new_context(reduced_motion="reduce") as context:
        page = opened(context.new_page(), url)
        ship = page.locator("[data-scene=ship]")
        window = 10 * (EXAMPLE.step_s + EXAMPLE.diff_s)
        f = Formulas(page)
        full, delta = (spans(EXAMPLE, LINK, window) for spans in (f.broadcast_spans, f.delta_spans))
        expect(ship.locator(".count")).to_have_text(
            [f"{f.steps_done(spans, window)} steps" for spans in (full, delta)]
        )
        expect(page.locator("[data-scene=landing] .said")).to_contain_text("delta of v12")
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        shown = page.locator("#dws").inner_html()
        page.evaluate(frames)
        assert page.locator(".view-explain").inner_html() in shown


def test_an_animation_runs_while_it_is_in_sight(page: Page, url: str, empty: None) -> None:
    """The page's own clock is turned on: nothing has to be waited for to see that it stays."""
    page.clock.install()
    opened(page, url)
    page.locator("[data-scene=ship]").scroll_into_view_if_needed()
    head = page.locator("[data-scene=ship] .playhead").first
    expect(head).not_to_have_attribute("x1", "64")
    page.locator("[data-scene=ship] .play").click()
    stopped = head.get_attribute("x1")
    page.clock.run_for(5000)
    assert head.get_attribute("x1") == stopped
    page.locator("[data-scene=ship] .play").click()
    page.clock.run_for(500)
    assert head.get_attribute("x1") != stopped


def test_what_the_study_found_is_drawn(page: Page, url: str, empty: None) -> None:
    opened(page, url)
    card = page.locator(".learned").first
    expect(card.locator("path.line")).to_have_count(3)
    expect(card.locator(".keys b")).to_have_text(
        [
            f"{plural(curve['staleness'], 'version')} old: {percent(curve['solved'])} solved after"
            for curve in CURVES
        ]
    )
    expect(card.locator("path.line.bad")).to_be_visible()


def test_what_a_pretrained_model_learned_is_drawn(page: Page, url: str, empty: None) -> None:
    opened(page, url)
    card = page.locator(".learned").last
    expect(card.locator("path.line")).to_have_count(2)
    expect(card.locator(".keys b")).to_have_text(
        [f"{task}: {first:.2f} \u2192 {last:.2f}, first and last tenth" for task, first, last in ENDS]
    )
