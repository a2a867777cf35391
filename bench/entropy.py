"""The fewest bytes per change that a coder of each encoding could need, by Shannon's entropy.

independent   every weight changes with the same probability, every value is drawn from one distribution: what
              a coder that knows nothing of the old weights can reach
by_exponent   both depend on the exponent of the old weight, which the receiver knows
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.change import Change

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Bytes per change."""

    independent: float
    by_exponent: float


def limits(change: Change) -> Limits:
    """The limits of one change of a model."""
    elements, values = _histograms(change)
    together = _bytes(elements.sum(keepdims=True), values.sum(0, keepdims=True))
    return Limits(together, _bytes(elements, values))


def _histograms(change: Change) -> tuple[Counts, Counts]:
    """Elements by exponent [256], and changed ones by exponent and value [256, 65536]."""
    elements, values = np.zeros(256, np.int64), np.zeros((256, 65536), np.int64)
    for bits in change.old.values():
        for part in np.array_split(bits.reshape(-1), max(bits.size >> 24, 1)):
            elements += np.bincount((part >> 7) & 0xFF, minlength=256)
    for patch in change.patches:
        exponent = (change.old[patch.name].reshape(-1)[patch.index] >> 7) & 0xFF
        np.add.at(values, (exponent, patch.ulps), 1)
    return elements, values


def _bytes(elements: Counts, values: Counts) -> float:
    """Bytes per change of positions and values in classes: elements [c], changed ones by value [c, 65536]."""
    changed = values.sum(1)
    positions = sum(_bits((k, n - k)) for n, k in zip(elements, changed, strict=True))
    return float((positions + sum(_bits(row[row > 0]) for row in values)) / changed.sum() / 8)


def _bits(counts: Iterable[int]) -> float:
    """Bits of a sequence in which each symbol occurs as often as `counts` says."""
    present = np.asarray([n for n in counts if n], np.float64)
    return float(-(present * np.log2(present / present.sum())).sum()) if present.size else 0.0
