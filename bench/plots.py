"""The pictures in docs/: bytes per change, time per sync, pauses. Small SVGs, light and dark alike."""

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench import links
from bench.results import DOCS, Results

mpl.use("svg")
_GREY = "#8b949e"
STYLE = {
    "svg.hashsalt": "bench",  # the same figures give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "text.color": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
_COLOURS = {
    "small": "#2da44e",
    "fast": "#0969da",
    "gap_zstd": "#bf8700",
    "bitmask_zstd": "#8250df",
    "others' way": "#cf222e",
    "whole model": _GREY,
}


def draw(results: Results) -> None:
    """Every picture for which there are figures."""
    with mpl.rc_context(STYLE):
        if "growth" in results:
            save("bench-bytes", _bytes, results["growth"]["changes"])
        if "links" in results:
            save("bench-links", _links, results)
        if "live" in results:
            save("bench-pauses", _pauses, results["live"]["syncs"])


def save(name: str, paint: Callable[[Axes, Any], None], figures: Any) -> None:
    """Paint docs/`name`.svg."""
    figure, axes = plt.subplots(figsize=(5.2, 3.0))
    paint(axes, figures)
    axes.grid(True)
    axes.legend(fontsize=8)
    figure.savefig(DOCS / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _bytes(axes: Axes, rows: list[dict[str, Any]]) -> None:
    shares = [100 * row["share"] for row in rows]
    names = {"bitmask_zstd": "bitmask + zstd", "gap_zstd": "gaps + zstd", "fast": "fast", "small": "small"}
    for key, label in names.items():
        axes.plot(shares, [row["per_change"][key] for row in rows], color=_COLOURS[key], label=label)
    for key, encoding in (("independent", "fast"), ("by_exponent", "small")):
        limits = [row["limits"][key] for row in rows]
        axes.plot(shares, limits, ":", color=_COLOURS[encoding], label=f"limit of {encoding}")
    axes.set(xscale="log", xlabel="weights changed, %", ylabel="bytes per change", ylim=(0, 3.5))


def _links(axes: Axes, results: Results) -> None:
    syncs = links.parts(results)
    for way in ("whole model", "others' way", "fast", "small"):
        seconds = [links.time(syncs[way], link) for link in links.CURVE]
        axes.plot(links.CURVE, seconds, color=_COLOURS[way], label=way)
    axes.set(xscale="log", yscale="log", xlabel="link, MB/s", ylabel="seconds per sync")


def _pauses(axes: Axes, syncs: dict[str, Any]) -> None:
    for kind, encoding in {"each second": "fast", "without a break": "small"}.items():
        pauses = syncs[kind]["pauses_ms"]
        shares = [100 * (rank + 1) / len(pauses) for rank in range(len(pauses))]
        axes.plot(pauses, shares, drawstyle="steps-post", color=_COLOURS[encoding], label=f"a sync {kind}")
    axes.set(xlabel="pause of generation, ms", ylabel="% of syncs at most", xlim=(0, None), ylim=(0, 101))
