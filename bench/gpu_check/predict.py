"""Predicts the cost of a sync on a card from bytes, bandwidths and this project's measured host rates.

For a kernel, a prediction divides the bytes that it moves by the share `_REACHED` of the card's memory
bandwidth. For work on the host, it uses the rates of `delta_weight_sync.cost`. If a measurement is off by
more than a factor of two, something else than the bandwidth limits the kernel.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from bench.shapes import Shapes, qwen_shapes, shapes_8b, shapes_experts
from delta_weight_sync import cost, util

CHANGED = 0.01
_REACHED = 0.85  # share of the data sheet's bandwidth that a plain copy reaches
_SHARE = 4  # the digest uses one of this many multiprocessors
_PER_MULTIPROCESSOR = 30e9  # bytes per second that one multiprocessor reads; assumed
_UNPACK = cost.Rate(0.0, 3.0)  # ns of one core per change; measured: 2.4 to 3.9
_LAUNCH_S = 0.15e-3  # for launching the two kernels of a commit, and waiting for them
_ROOM = 2.3  # bytes of GPU memory that a replica needs per weight


class Card(NamedTuple):
    """From the data sheet: bytes per second of memory and bus, multiprocessors, bytes of memory."""

    memory: float
    bus: float
    multiprocessors: int
    size: float


CARDS = {
    "L4": Card(300e9, 12e9, 58, 24e9),
    "A100": Card(2039e9, 25e9, 108, 80e9),
    "H100": Card(3350e9, 50e9, 132, 80e9),
}


def models() -> Mapping[str, Shapes]:
    """The shapes of the models that are predicted and measured."""
    return {"Qwen3-0.6B": qwen_shapes(), "Qwen3-8B": shapes_8b(), "Qwen3-30B-A3B": shapes_experts()}


def seconds(weights: int, copied: float, bus: float, multiprocessors: int, threads: int) -> dict[str, float]:
    """Predict the seconds of each part of a sync. `copied`: bytes per second that a copy reads and writes."""
    changes = CHANGED * weights
    digest = min(copied, multiprocessors // _SHARE * _PER_MULTIPROCESSOR)
    host = cost.DECODE["fast"].seconds(weights, changes) / threads + cost.PLACE.seconds(0, changes) / 3
    return {
        "stage, host: decode and place": host,
        "stage, bus: 6 bytes per change": 6 * changes / bus,
        "stage, digest on a quarter of the GPU": 2.01 * weights / digest,
        "digest on all of the GPU": 2.01 * weights / copied,
        "stage, read the old bits": 80 * changes / copied,
        "commit, write and read back": 110 * changes / copied + _LAUNCH_S,
        "diff, device: mirror on the GPU": (4 * weights + 9 * changes) / copied,
        "diff, device: mirror on the host": 2 * weights / bus,
        "diff, host: changes over the bus, unpacked": 4 * changes / bus + _UNPACK.seconds(0, changes),
    }


def table() -> str:
    """The predictions for known cards as Markdown; a dash if the model does not fit into the memory."""
    sizes = {name: sum(map(math.prod, shapes.values())) for name, shapes in models().items()}
    columns = [(model, name) for model in sizes for name in CARDS]
    threads = util.threads(8)
    all_of_them = {
        (model, name): seconds(sizes[model], _REACHED * card.memory, card.bus, card.multiprocessors, threads)
        for model, name in columns
        for card in [CARDS[name]]
    }
    lines = ["| predicted, 1 % changed, 8 cores | " + " | ".join(f"{m}, {c}" for m, c in columns) + " |"]
    lines += ["| --- |" + " --- |" * len(columns)]
    for part in all_of_them[columns[0]]:
        cells = (_cell(all_of_them[key][part], sizes[key[0]], CARDS[key[1]]) for key in columns)
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(predicted: float, weights: int, card: Card) -> str:
    return util.time_text(float(f"{predicted:.2g}")) if _ROOM * weights <= card.size else "-"
