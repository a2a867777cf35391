"""What the animations compute: right in Python, and the same in the browser."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from inference_space.dashboard import formulas as f
from inference_space.dashboard.facts import EXAMPLE, LINK, scene
from inference_space.dashboard.shell import STATIC
from shared.protocol import AnchorRef, DeltaRef, FileRef, Manifest

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINKS = (1e5, 3e6, LINK, 5e9)


def numbers() -> list[float]:
    chance = random.Random(3)
    spread = [chance.choice((-1, 1)) * 2 ** chance.uniform(-20, 3) for _ in range(400)]
    edges = [1.0, -2.0, 0.0078125, 1 - 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-8, 2**-126]
    return [float(torch.tensor(value)) for value in spread + edges]


def test_the_cast_is_that_of_torch() -> None:
    for value in numbers():
        cast = torch.tensor(value).to(torch.bfloat16)
        assert f.bf16(value) == float(cast), value
        assert f.bits(float(cast)) == int(cast.view(torch.uint16)), value


def test_a_weight_flips_as_often_as_the_formula_says() -> None:
    weight, update = 0.0213, 3e-6
    tick = f.ulp(weight)
    masters = [f.bf16(weight) + tick * (n / 4000 - 0.5) for n in range(1, 4000)]
    flips = sum(f.bf16(master + update) != f.bf16(master) for master in masters)
    assert flips / len(masters) == pytest.approx(f.flip_chance(weight, update), rel=0.03)


def test_the_example_flips_at_the_rate_that_it_names() -> None:
    given = scene(None, None)
    (example,) = given["facts"]
    grid = given["grid"]
    assert f.flip_share(grid["weights"], grid["updates"], example["rate"]) == pytest.approx(0.0101, rel=1e-6)
    assert given["measured"] is False


@pytest.mark.parametrize("link", LINKS)
def test_a_timeline_adds_up(link: float) -> None:
    window = 10 * (EXAMPLE.step_s + EXAMPLE.diff_s)
    full, delta = f.broadcast_spans(EXAMPLE, link, window), f.delta_spans(EXAMPLE, link, window)
    wait = EXAMPLE.full_bytes / link
    assert f.steps_done(full, window) == pytest.approx(window / (EXAMPLE.step_s + wait), abs=1)
    assert f.steps_done(delta, window) == 10
    assert f.idle_share(delta, "trainer", window) == pytest.approx(
        EXAMPLE.diff_s / (EXAMPLE.step_s + EXAMPLE.diff_s)
    )
    for spans in (full, delta):
        for lane in ("trainer", "replica"):
            ends = sorted((a, b) for at, _, a, b in spans if at == lane)
            assert all(after[0] == pytest.approx(before[1]) for before, after in itertools.pairwise(ends))


def test_uploads_never_overlap_however_slow_the_link() -> None:
    spans = f.delta_spans(EXAMPLE, 3e5, 400)
    ups = [(a, b) for lane, what, a, b in spans if (lane, what) == ("wire", "up")]
    assert len(ups) > 3
    assert all(after[0] >= before[1] for before, after in itertools.pairwise(ups))


def test_the_break_even_link_is_where_both_take_as_long() -> None:
    link = f.break_even_link(EXAMPLE)
    bucket, whole = (sum(s for _, s in stages(EXAMPLE, link)) for stages in (f.bucket_sync, f.broadcast_sync))
    assert bucket == pytest.approx(whole)


@pytest.mark.parametrize("every", [2, 5, 12])
@pytest.mark.parametrize("joins", [1, 4, 5, 12])
def test_who_joins_late_takes_what_a_manifest_names(every: int, joins: int) -> None:
    story = f.landings(EXAMPLE, 12, every, joins)
    until = next(n for n, step in enumerate(story) if step[0] == "join")
    taken = [step for step in story[until + 1 :] if step[2] == "B"]
    catching_up = taken[: 1 + joins % every]
    manifest = manifest_of(joins, joins - joins % every)
    assert catching_up[0][:2] == ("take-anchor", manifest.anchor.version)
    assert [step[1] for step in catching_up[1:]] == [
        delta.version for delta in manifest.deltas_after(manifest.anchor.version) or ()
    ]
    assert sum(step[3] for step in catching_up) == f.bytes_to_join(EXAMPLE, every, joins)
    assert [step[1] for step in taken[1 + joins % every :]] == list(range(joins + 1, 13))


def manifest_of(version: int, anchor: int) -> Manifest:
    ref = {"key": "x", "size": 1, "sha256": "0" * 64}
    deltas = tuple(DeltaRef(**ref, version=v, changed=1) for v in range(anchor + 1, version + 1))
    return Manifest(
        run="r",
        version=version,
        epoch=1,
        sync=version,
        created_at=0,
        digest="0" * 16,
        anchor=AnchorRef(version=anchor, files=(FileRef(**ref),)),
        deltas=deltas,
        parent=FileRef(**ref) if version else None,
        changed=1,
        total=1,
        full_bytes=2,
    )


@pytest.mark.full
def test_the_browser_computes_the_same(page: Page, tmp_path: Path) -> None:
    page.goto("about:blank")
    page.add_script_tag(path=STATIC / "formulas.js")
    weights, updates = numbers(), [0.3 + n % 7 / 10 for n in range(len(numbers()))]
    facts = [EXAMPLE, replace(EXAMPLE, full_bytes=471e3, delta_bytes=10.8e3, step_s=1.7, encode_s=0.004)]
    calls: list[tuple[str, list]] = [("flip_share", [weights, updates, 1e-6])]
    calls += [(name, [value]) for name in ("ulp", "bf16") for value in weights]
    calls += [("bits", [f.bf16(value)]) for value in weights]
    for one in facts:
        calls += [("break_even_link", [one]), ("landings", [one, 12, 5, 8]), ("bytes_to_join", [one, 5, 8])]
        calls += [("moved_bytes", [one, 3])]
        for link in LINKS:
            calls += [(name, [one, link, 90.0]) for name in ("broadcast_spans", "delta_spans")]
            calls += [(name, [one, link]) for name in ("bucket_sync", "broadcast_sync")]
            calls += [("stopped_s", [one, link, 3])]
            spans = f.delta_spans(one, link, 90.0)
            calls += [("idle_share", [spans, "replica", 90.0]), ("steps_done", [spans, 90.0])]
    asked = [(name, [asdict(a) if isinstance(a, f.Facts) else a for a in args]) for name, args in calls]
    answers = page.evaluate("calls => calls.map(([name, args]) => dws.formulas[name](...args))", asked)
    for (name, args), answer in zip(calls, answers, strict=True):
        assert same(answer, getattr(f, name)(*args)), (name, args)


def same(one: object, other: object) -> bool:
    if isinstance(other, list | tuple):
        return isinstance(one, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, float | int):
        return isinstance(one, float | int) and math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-15)
    return one == other
