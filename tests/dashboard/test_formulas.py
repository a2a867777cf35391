"""What the animations compute is right, in the browser that computes it."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import AnchorRef, DeltaRef, FileRef
from inference_space.dashboard.facts import EXAMPLE, LINK, Facts, scene
from inference_space.dashboard.static_files import STATIC

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.full

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
    weight, update = 0.0213, 3e-6
    middle, tick = f.bf16(weight), f.ulp(weight)
    masters = [middle + tick * (n / 4000 - 0.5) for n in range(1, 4000)]
    before, after = (f.each("bf16", [[master + by] for master in masters]) for by in (0, update))
    flips = sum(map(operator.ne, before, after))
    assert flips / len(masters) == pytest.approx(f.flip_chance(weight, update), rel=0.03)


def test_the_example_flips_at_the_rate_that_it_names(f: Formulas) -> None:
    given = scene(None, None)
    weights, updates = given["grid"]["weights"], given["grid"]["updates"]
    rate = f.rate_for_share(weights, updates, EXAMPLE.changed)
    assert f.flip_share(weights, updates, rate) == pytest.approx(EXAMPLE.changed, rel=1e-6)
    assert given["measured"] is False


def test_a_timeline_adds_up(f: Formulas) -> None:
    window = 10 * (EXAMPLE.step_s + EXAMPLE.diff_s)
    for link in LINKS:
        full, delta = f.broadcast_spans(EXAMPLE, link, window), f.delta_spans(EXAMPLE, link, window)
        wait = EXAMPLE.full_bytes / link
        assert f.steps_done(full, window) == pytest.approx(window / (EXAMPLE.step_s + wait), abs=1)
        assert f.steps_done(delta, window) == 10
        assert f.idle_share(delta, "trainer", window) == pytest.approx(
            EXAMPLE.diff_s / (EXAMPLE.step_s + EXAMPLE.diff_s)
        )
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
        assert [step[1] for step in catching_up[1:]] == [delta.version for delta in manifest.way().deltas]
        assert sum(step[3] for step in catching_up) == f.bytes_to_join(EXAMPLE, every, joins)
        assert [step[1] for step in taken[1 + joins % every :]] == list(range(joins + 1, 13))


def manifest_of(version: int, anchor: int) -> Manifest:
    ref = {"key": "x", "size": 1, "sha256": "0" * 64}
    deltas = tuple(DeltaRef(**ref, base=v - 1, version=v, changed=1) for v in range(anchor + 1, version + 1))
    return Manifest(
        run="r",
        version=version,
        born=0.0,
        writer_term=1,
        writer="0" * 32,
        sync=version,
        created_at=0,
        digest="0" * 16,
        anchor=AnchorRef(version=anchor, files=(FileRef(**ref),)),
        deltas=deltas,
        jumps=(),
        parent=FileRef(**ref) if version else None,
        changed=1,
        total=1,
        full_bytes=2,
    )
