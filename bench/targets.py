"""What this project promised of itself, each held against the figures of the same results.json."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import deltas
from bench.results import Results

_ABOUT_ONE_PERCENT = (0.005, 0.02)


class Target(NamedTuple):
    """`read` gives the figure; it must not be above (`most`) or below (`least`) the bound."""

    text: str
    section: str
    read: Callable[[Any], float]
    least: float | None = None
    most: float | None = None


def _worst(figure: Callable[[Any], float], trainer: str) -> Callable[[Any], float]:
    """The largest figure of all sets of about 1 % of one kind of trainer."""

    def read(size: Any) -> float:
        low, high = _ABOUT_ONE_PERCENT
        return max(figure(s) for s in size["sets"] if s["trainer"] == trainer and low <= s["share"] <= high)

    return read


def _per_change(encoding: str, trainer: str) -> Callable[[Any], float]:
    return _worst(lambda one: float(one["per_change"][encoding]), trainer)


def _above_limit(encoding: str) -> Callable[[Any], float]:
    return _worst(lambda one: float(one["above_limit"][encoding]), deltas.LATE)


def _qwen_mb(encoding: str) -> Callable[[Any], float]:
    def read(size: Any) -> float:
        sets = [s for s in size["sets"] if s["model"].startswith("Qwen") and s["trainer"] == deltas.LATE]
        return float(sets[0]["bytes"][encoding]) / 1e6

    return read


def _gb_s(part: str) -> Callable[[Any], float]:
    return lambda speed: float(speed["parts"][part]["best_gb_s"])


def _at(*path: str) -> Callable[[Any], float]:
    def read(section: Any) -> float:
        for key in path:
            section = section[key]
        return float(section)

    return read


def _times(policy: str, cpu: str) -> Callable[[Any], float]:
    """Tokens per CPU second with our patches, in multiples of those without."""

    def read(section: Any) -> float:
        found = [float(r["ratio"]) for r in section["runs"] if (r["policy"], r["cpu"]) == (policy, cpu)]
        return found[0] if found else math.nan

    return read


TARGETS = (
    Target("fast, fp32 master, about 1 %: B per change", "size", _per_change("fast", deltas.LATE), most=1.27),
    Target(
        "small, fp32 master, about 1 %: B per change", "size", _per_change("small", deltas.LATE), most=0.9
    ),
    Target("fast above its limit", "size", _above_limit("fast"), most=0.03),
    Target("small above its limit", "size", _above_limit("small"), most=0.06),
    Target(
        "small, bf16 weights, about 1 %: B per change", "size", _per_change("small", deltas.BF16), most=0.65
    ),
    Target("Qwen3-0.6B-shaped at 1 %, fast: MB", "size", _qwen_mb("fast"), most=7.6),
    Target("Qwen3-0.6B-shaped at 1 %, small: MB", "size", _qwen_mb("small"), most=5.4),
    Target(
        "publish fast: times as fast as others' way",
        "speed",
        _at("ratios", "publish fast bf16", "median"),
        least=4.0,
    ),
    Target("publish fast: GB/s of model", "speed", _gb_s("publish fast bf16"), least=3.5),
    Target("receive fast: GB/s of model", "speed", _gb_s("receive fast"), least=6.0),
    Target("publish small: GB/s of model", "speed", _gb_s("publish small bf16"), least=4.0),
    Target("receive small: GB/s of model", "speed", _gb_s("receive small"), least=4.0),
    Target("join at 500: MB / (anchor + exact difference)", "joining", _at("join", "ratio"), most=1.5),
    Target(
        "commit: times as fast as vLLM's sparse loader",
        "live",
        _at("commits", "times_sparse_loader"),
        least=10.0,
    ),
    Target("throughput kept, a sync every 2 s", "live", _at("throughput_kept", "every 2 s"), least=0.97),
    Target("throughput kept, a sync every second", "live", _at("throughput_kept", "each second"), least=0.97),
    Target(
        "AVX2 only, shipped policy: now / before", "cpu", _times("the shipped policy", "AVX2 only"), least=4.0
    ),
    Target("AVX2 only, SmolLM2-135M: now / before", "cpu", _times("SmolLM2-135M", "AVX2 only"), least=5.0),
    Target(
        "this CPU, shipped policy: now / before", "cpu", _times("the shipped policy", "this CPU"), least=1.0
    ),
    Target("this CPU, SmolLM2-135M: now / before", "cpu", _times("SmolLM2-135M", "this CPU"), least=1.0),
    Target(
        "dashboard, 10,000 versions: worst refresh, ms", "dashboard", _at("refresh_ms", "worst"), most=300.0
    ),
    Target(
        "dashboard, 10,000 versions: worst first paint, ms",
        "dashboard",
        _at("first_paint_ms", "worst"),
        most=2000.0,
    ),
)


def check(results: Results) -> list[dict[str, Any]]:
    """Every target: text, bound, figure, met. Not measured: figure and met are None."""
    return [_check(target, results.get(target.section)) for target in TARGETS]


def explain(checked: list[dict[str, Any]]) -> str:
    """One line per target."""
    marks = {True: "met", False: "MISSED", None: "unmeasured"}
    return "\n".join(
        f"{marks[t['met']]:10}  {t['text']:46} {_shown(t['figure']):>8}  ({t['bound']})" for t in checked
    )


def _shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4g}"


def _check(target: Target, section: Any) -> dict[str, Any]:
    figure = None if section is None or "unmeasured" in section else round(target.read(section), 4)
    figure = None if figure is None or math.isnan(figure) else figure
    bound = f"at most {target.most}" if target.least is None else f"at least {target.least}"
    met = None if figure is None else _holds(target, figure)
    return {"text": target.text, "bound": bound, "figure": figure, "met": met}


def _holds(target: Target, figure: float) -> bool:
    if target.least is not None:
        return figure >= target.least
    return target.most is not None and figure <= target.most
