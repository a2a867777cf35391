"""Where in the model a version's changes are, and how far they went, as HTML."""

from __future__ import annotations

import math

from markupsafe import Markup

from inference_space.dashboard.anatomy import FAR, Anatomy, Cells, cells
from inference_space.dashboard.templates import render_template

MAX_CELLS, MAX_REST = 20_000, 200  # of the map, and tensors outside of it, that a browser is given
_DISTANCES = [(-FAR, f"≤ −{FAR}"), *((at, f"−{-at}") for at in range(1 - FAR, 0))]
_DISTANCES += [*((at, f"+{at}") for at in range(1, FAR)), (FAR, f"≥ {FAR}")]


def inside(delta: Anatomy) -> Markup:
    """The heat map and the histogram of one delta."""
    found = cells(delta.tensors)
    layers = sorted({layer for _, layer in found if layer is not None})
    heat = _HeatMap(found, layers) if layers else None
    if heat and len(heat.kinds) * len(layers) > MAX_CELLS:
        heat = None
    rest = [(kind, cell) for (kind, layer), cell in found.items() if layer is None][:MAX_REST]
    return render_template(
        "inside.html", delta=delta, cells=found, heat=heat, rest=rest, distances=_DISTANCES
    )


class _HeatMap:
    """Layers by kinds of tensor, shares on a logarithmic scale."""

    def __init__(self, found: Cells, layers: list[int]) -> None:
        shares = [cell.share for (_, layer), cell in found.items() if layer is not None]
        self.layers, self.low, self.high = layers, min(shares), max(shares)
        self.kinds = list(dict.fromkeys(kind for kind, layer in found if layer is not None))

    def place(self, share: float) -> float:
        """0 at the smallest share, 1 at the largest."""
        if self.high <= self.low:
            return 1.0
        return math.log(share / self.low) / math.log(self.high / self.low)
