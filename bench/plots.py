"""The picture in docs/: how long a sync pauses generation. A small SVG, light and dark alike."""

from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.results import DOCS, Results

mpl.use("svg")
_GREY = "#8b949e"
_STYLE = {
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


def draw(results: Results) -> None:
    """The picture, if there are figures."""
    if "live" not in results:
        return
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.0))
        _pauses(axes, results["live"]["syncs"])
        axes.grid(True)
        axes.legend(fontsize=8)
        file = DOCS / "bench-pauses.svg"
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


def _pauses(axes: Axes, syncs: dict[str, Any]) -> None:
    for kind, colour in {"each second": "#0969da", "without a break": "#2da44e"}.items():
        pauses = syncs[kind]["pauses_ms"]
        shares = [100 * (rank + 1) / len(pauses) for rank in range(len(pauses))]
        axes.plot(pauses, shares, drawstyle="steps-post", color=colour, label=f"a sync {kind}")
    axes.set(xlabel="pause of generation, ms", ylabel="% of syncs at most", xlim=(0, None), ylim=(0, 101))
