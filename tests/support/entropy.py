"""The fewest bytes per change that a coder of each encoding could need, by Shannon's entropy.

independent   every weight changes with the same probability, and every value is drawn from one distribution:
              the limit of a coder that knows nothing about the old weights
by_exponent   both depend on the exponent of the old weight, which the receiver knows
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits, Patch

Counts = NDArray[np.int64]
_EXPONENTS = 256
_VALUES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Bytes per change; 0 where nothing changed."""

    independent: float
    by_exponent: float


def limits(old: Mapping[str, Bits], patches: Sequence[Patch]) -> Limits:
    """Compute the limits for `patches` of `old`, the bits of every tensor of the model."""
    elements = sum((_exponents(bits) for bits in old.values()), np.zeros(_EXPONENTS, np.int64))
    moved = [_moved(old[patch.name], patch) for patch in patches]
    classes, counts = np.unique(np.concatenate([*moved, np.empty(0, np.uint32)]), return_counts=True)
    exponent = classes // _VALUES
    value = classes % _VALUES
    changed = np.bincount(exponent, counts, _EXPONENTS).astype(np.int64)
    together = np.bincount(value, counts, _VALUES).astype(np.int64)
    if not changed.any():
        return Limits(0.0, 0.0)
    alone = _positions(elements.sum(), changed.sum()) + _bits(together)
    known = sum(_positions(n, k) for n, k in zip(elements, changed, strict=True))
    known += sum(_bits(counts[exponent == e]) for e in np.flatnonzero(changed))
    return Limits(alone / changed.sum() / 8, known / changed.sum() / 8)


def _exponents(bits: Bits) -> Counts:
    """Count elements by exponent, in chunks, because counting needs eight bytes per element."""
    parts = np.array_split(bits.reshape(-1), max(bits.size >> 24, 1))
    counts = np.zeros(_EXPONENTS, np.int64)
    for part in parts:
        counts += np.bincount((part >> 7) & 0xFF, minlength=_EXPONENTS)
    return counts


def _moved(bits: Bits, patch: Patch) -> NDArray[np.uint32]:
    """The class of each change: exponent of the old weight, then how far it moved."""
    exponent = (bits.reshape(-1)[patch.index] >> 7) & 0xFF
    return exponent.astype(np.uint32) * np.uint32(_VALUES) + patch.ulps


def _positions(elements: int, changed: int) -> float:
    """Bits that identify the changed elements."""
    return _bits(np.array([changed, elements - changed]))


def _bits(counts: Counts) -> float:
    """Bits of a sequence in which each symbol occurs as often as `counts` says."""
    present = counts[counts > 0].astype(np.float64)
    return float(-(present * np.log2(present / present.sum())).sum()) if present.size else 0.0
