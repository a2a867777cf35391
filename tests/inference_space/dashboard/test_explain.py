"""The Explain tab: its formulas, in the browser that computes them, and its animations."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.util import size_text, time_text
from inference_space.dashboard.html import STATIC
from inference_space.dashboard.views import EXAMPLE, LINK, Facts, scene
from tests.support.browser import PATIENCE_S
from tests.support.records import manifest_of

if TYPE_CHECKING:
    from tests.support.real_run import RealRun, Shown

pytestmark = pytest.mark.full

SCENES = ("ship", "rounding", "landing", "sync")
LINKS = (1e5, 3e6, LINK, 5e9)


class Formulas:
    """The formulas that a page has loaded, under their names."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: self.each(name, [given])[0]

    def each(self, name: str, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """The answers to many calls."""
        plain = [[asdict(one) if isinstance(one, Facts) else one for one in given] for given in calls]
        ask = "([name, calls]) => calls.map(given => window.dws.formulas[name](...given))"
        return self._page.evaluate(ask, [name, plain])


def opened(page: Page, url: str) -> Page:
    page.goto(f"{url}#explain")
    expect(page.locator(".scene")).to_have_count(len(SCENES))
    return page


@pytest.fixture
def example(page: Page, url: str, bucket: object, shown: Shown) -> Page:
    """The tab while the bucket is empty."""
    shown(None)
    return opened(page, url)


def test_the_numbers_are_the_runs(page: Page, url: str, real: RealRun, shown: Shown) -> None:
    shown(real)
    opened(page, url)
    given = httpx.get(f"{url}dashboard/explain", timeout=PATIENCE_S).json()
    mine = given["facts"][0]
    manifests = [manifest for manifest in real.reader.versions() if manifest.version]
    sizes = sorted(manifest.deltas[-1].size for manifest in manifests)
    assert given["measured"] is True
    assert mine["delta_bytes"] == sizes[1], "the median of three"
    assert mine["full_bytes"] == manifests[0].full_bytes
    assert mine["link"] == pytest.approx(LINK * mine["full_bytes"] / EXAMPLE.full_bytes)
    assert mine["changed"] == manifests[0].changed / manifests[0].total
    said = page.locator("[data-scene=ship] .said")
    link = size_text(mine["link"])
    expect(said).to_contain_text(f"The {size_text(sizes[1])} that changed")
    expect(said).to_contain_text(f"This small model starts on a small link: {link}/s")
    expect(page.locator("[data-scene=rounding] .tally")).to_contain_text("tiny-qwen changed")


def test_without_a_run_an_example_is_shown_and_its_table_holds(example: Page) -> None:
    page = example
    expect(page.locator(".whose button")).to_have_text(["an example: Qwen3-0.6B"])
    f = Formulas(page)
    cells = page.locator("[data-scene=sync] tbody tr td").all_inner_texts()
    whole = EXAMPLE.full_bytes / LINK
    through = sum(s for _, s in f.bucket_sync(EXAMPLE, LINK))
    lost = f.stopped_s(EXAMPLE, LINK, 3)
    moved = f.moved_bytes(EXAMPLE, 3)
    assert cells[:2] == [time_text(through), time_text(whole)]
    assert cells[6:8] == [time_text(seconds) for seconds in lost]
    assert cells[8:10] == [size_text(count) for count in moved]


def test_everything_answers_to_the_keyboard(example: Page) -> None:
    page = example
    scenes = ("sync", "landing", "rounding")
    sync, landing, rounding = (page.locator(f"[data-scene={name}]") for name in scenes)
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
    browser: Browser, url: str, bucket: object, shown: Shown
) -> None:
    shown(None)
    with browser.new_context(reduced_motion="reduce") as context:
        page = opened(context.new_page(), url)
        ship = page.locator("[data-scene=ship]")
        window = 10 * (EXAMPLE.step_s + EXAMPLE.diff_s)
        f = Formulas(page)
        full, delta = (spans(EXAMPLE, LINK, window) for spans in (f.broadcast_spans, f.delta_spans))
        counts = [f"{f.steps_done(spans, window)} steps" for spans in (full, delta)]
        expect(ship.locator(".count")).to_have_text(counts)
        expect(page.locator("[data-scene=landing] .said")).to_contain_text("delta of v12")
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        shown = page.locator("#dws").inner_html()
        page.evaluate(frames)
        assert page.locator(".view-explain").inner_html() in shown


def test_an_animation_runs_while_it_is_in_sight(page: Page, url: str, bucket: object, shown: Shown) -> None:
    """The page's own clock is turned on: nothing has to be waited for to see that it stays."""
    shown(None)
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


@pytest.fixture
def f(page: Page) -> Formulas:
    page.goto("about:blank")
    page.add_script_tag(path=STATIC / "formulas.js")
    return Formulas(page)


def numbers() -> list[float]:
    chance = random.Random(3)
    spread = [chance.choice((-1, 1)) * 2 ** chance.uniform(-20, 3) for _ in range(400)]
    edges = [1.0, -2.0, 0.0078125, 1 - 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-8, 2**-126]
    return [float(torch.tensor(value)) for value in spread + edges]


def test_the_cast_is_that_of_torch(f: Formulas) -> None:
    values = numbers()
    cast = torch.tensor(values).to(torch.bfloat16)
    assert f.each("bf16", [[value] for value in values]) == cast.tolist()
    assert f.each("bits", [[value] for value in cast.tolist()]) == cast.view(torch.uint16).tolist()


def test_a_weight_flips_as_often_as_the_formula_says(f: Formulas) -> None:
    weight = 0.0213
    update = 3e-6
    middle = f.bf16(weight)
    tick = f.ulp(weight)
    masters = [middle + tick * (n / 4000 - 0.5) for n in range(1, 4000)]
    before, after = (f.each("bf16", [[master + by] for master in masters]) for by in (0, update))
    flips = sum(map(operator.ne, before, after))
    assert flips / len(masters) == pytest.approx(f.flip_chance(weight, update), rel=0.03)


def test_the_example_flips_at_the_rate_that_it_names(f: Formulas) -> None:
    given = scene(None, None)
    weights = given["grid"]["weights"]
    updates = given["grid"]["updates"]
    rate = f.rate_for_share(weights, updates, EXAMPLE.changed)
    assert f.flip_share(weights, updates, rate) == pytest.approx(EXAMPLE.changed, rel=1e-6)
    assert given["measured"] is False


def test_a_timeline_adds_up(f: Formulas) -> None:
    window = 10 * (EXAMPLE.step_s + EXAMPLE.diff_s)
    for link in LINKS:
        full = f.broadcast_spans(EXAMPLE, link, window)
        delta = f.delta_spans(EXAMPLE, link, window)
        wait = EXAMPLE.full_bytes / link
        assert f.steps_done(full, window) == pytest.approx(window / (EXAMPLE.step_s + wait), abs=1)
        assert f.steps_done(delta, window) == 10
        idle = EXAMPLE.diff_s / (EXAMPLE.step_s + EXAMPLE.diff_s)
        assert f.idle_share(delta, "trainer", window) == pytest.approx(idle)
        for spans, lane in itertools.product((full, delta), ("trainer", "replica")):
            ends = sorted((a, b) for at, _, a, b in spans if at == lane)
            assert all(after[0] == pytest.approx(before[1]) for before, after in itertools.pairwise(ends))


def test_uploads_never_overlap_however_slow_the_link(f: Formulas) -> None:
    spans = f.delta_spans(EXAMPLE, 3e5, 400)
    ups = [(a, b) for lane, what, a, b in spans if (lane, what) == ("wire", "up")]
    assert len(ups) > 3
    assert all(after[0] >= before[1] for before, after in itertools.pairwise(ups))


def test_the_break_even_link_is_where_both_take_as_long(f: Formulas) -> None:
    link = f.break_even_link(EXAMPLE)
    bucket, whole = (sum(s for _, s in stages(EXAMPLE, link)) for stages in (f.bucket_sync, f.broadcast_sync))
    assert bucket == pytest.approx(whole)


@pytest.mark.parametrize("every", [2, 5, 12])
def test_who_joins_late_takes_what_a_manifest_names(f: Formulas, every: int) -> None:
    for joins in (1, 4, 5, 12):
        story = f.landings(EXAMPLE, 12, every, joins)
        until = next(n for n, step in enumerate(story) if step[0] == "join")
        taken = [step for step in story[until + 1 :] if step[2] == "B"]
        catching_up = taken[: 1 + joins % every]
        manifest = manifest_of(joins, joins - joins % every)
        assert catching_up[0][:2] == ["take-anchor", manifest.anchor.version]
        assert [step[1] for step in catching_up[1:]] == [delta.version for delta in manifest.recipe().deltas]
        assert sum(step[3] for step in catching_up) == f.bytes_to_join(EXAMPLE, every, joins)
        assert [step[1] for step in taken[1 + joins % every :]] == list(range(joins + 1, 13))
