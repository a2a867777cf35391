"""Where in the model a version's changes are, and how far they went, as HTML."""

from __future__ import annotations

import math
from html import escape

from inference_space.dashboard.anatomy import FAR, Anatomy, Cells, cells
from inference_space.dashboard.tables import card
from inference_space.dashboard.words import number, percent


def inside(delta: Anatomy) -> str:
    """The heat map and the histogram of one delta."""
    about = (
        f"v{delta.base} → v{delta.version}: {number(delta.changes)} weights changed in "
        f"{len(delta.tensors)} tensors"
    )
    found = cells(delta.tensors)
    return card("Where the changes are", about, _heat(found) + _outside(found)) + card(
        "How far they moved",
        "in units of the last place (ULP): ±1 is the next bf16 number",
        _histogram(delta.ulps) if delta.ulps else f"<p>{escape(delta.why)}</p>",
    )


def _heat(found: Cells) -> str:
    layers = sorted({layer for _, layer in found if layer is not None})
    if not layers:
        return ""
    kinds = list(dict.fromkeys(kind for kind, layer in found if layer is not None))
    shares = {place: changes / elements for place, (changes, elements) in found.items()}
    scale = _Scale([share for (_, layer), share in shares.items() if layer is not None])
    head = "".join(f'<th scope="col">{layer}</th>' for layer in layers)
    rows = "".join(
        f'<tr><th scope="row">{escape(kind)}</th>'
        + "".join(_cell(kind, layer, found.get((kind, layer)), scale) for layer in layers)
        + "</tr>"
        for kind in kinds
    )
    about = 'tabindex="0" role="region" aria-label="Changes by layer and kind of tensor"'
    legend = f"<span>{percent(scale.low)}</span><i></i><span>{percent(scale.high)} of a tensor</span>"
    return (
        f'<div class="scroll heat" {about}><table style="--layers:{len(layers)}"><thead><tr>'
        f'<th scope="col">layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="scale">{legend}</p>'
    )


class _Scale:
    """Shares on a logarithmic scale: 0 at the smallest, 1 at the largest."""

    def __init__(self, shares: list[float]) -> None:
        self.low, self.high = min(shares), max(shares)

    def place(self, share: float) -> float:
        if self.high <= self.low:
            return 1.0
        return math.log(share / self.low) / math.log(self.high / self.low)


def _cell(kind: str, layer: int, counts: tuple[int, int] | None, scale: _Scale) -> str:
    if counts is None:
        return f'<td title="layer {layer}, {escape(kind)}: unchanged"><span>none</span></td>'
    changes, elements = counts
    words = f"{percent(changes / elements)}"
    about = f"layer {layer}, {escape(kind)}: {words}, {number(changes)} of {number(elements)}"
    return (
        f'<td style="--heat:{scale.place(changes / elements):.2f}" title="{about}"><span>{words}</span></td>'
    )


def _outside(found: Cells) -> str:
    rest = [(kind, counts) for (kind, layer), counts in found.items() if layer is None]
    words = (
        f"<b>{escape(kind)}</b> {percent(changes / elements)} of {number(elements)}"
        for kind, (changes, elements) in rest
    )
    return f'<p class="rest">outside the layers: {", ".join(words)}</p>' if rest else ""


def _histogram(ulps: dict[int, int]) -> str:
    total, most = sum(ulps.values()), max(ulps.values())
    bars = "".join(_bar(at, ulps.get(at, 0), total, most) for at in range(-FAR, FAR + 1) if at)
    one = (ulps.get(1, 0) + ulps.get(-1, 0)) / total
    near = f"<b>{percent(one)}</b> moved to a neighbouring number."
    return f'<p class="rest">{near}</p><ol class="bars">{bars}</ol>'


def _bar(at: int, count: int, total: int, most: int) -> str:
    name = f"≤ −{FAR}" if at == -FAR else f"≥ {FAR}" if at == FAR else f"{at:+d}".replace("-", "−")
    share = percent(count / total)
    return (
        f'<li><em>{share}</em><u style="height:{100 * count / most:.1f}%"></u>'
        f'<span>{name}</span><span class="sr">ULP: {number(count)} weights</span></li>'
    )
