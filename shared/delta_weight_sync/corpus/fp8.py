"""What an FP8 copy of the weights sees of a change: e4m3, a scale per tensor that stays as it was at first.

The scale is the power of two that brings the largest weight of the tensor's first version just below 448, the
largest number of e4m3, so that scaling itself rounds nothing. Numbers beyond it are cut off there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits, Patch

_LARGEST, _SMALLEST_EXPONENT, _FRACTION_BITS = 448.0, -6, 3


def scale_of(bits: Bits) -> int:
    """The exponent of a tensor's scale; 0 for one whose weights are all zero or not finite."""
    values = np.abs(to_float(bits.reshape(-1)))
    largest = float(values[np.isfinite(values)].max(initial=0.0))
    return int(np.floor(np.log2(_LARGEST / largest))) if largest else 0


def changed(old: Bits, patch: Patch, scale: int) -> int:
    """Of the changes of a tensor with bits `old` those that its FP8 copy shows."""
    before = old.reshape(-1)[patch.index]
    return int(np.count_nonzero(rounded(before, scale) != rounded(before + patch.ulps, scale)))


def rounded(bits: Bits, scale: int) -> NDArray[np.uint32]:
    """The e4m3 number nearest to each bf16 weight times 2^scale, ties to even, as float32 bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.ldexp(to_float(bits), scale)
        exponent = np.frexp(values)[1] - 1
        step = np.ldexp(np.float32(1), np.maximum(exponent, _SMALLEST_EXPONENT) - _FRACTION_BITS)
        nearest = np.clip(np.rint(values / step) * step, -_LARGEST, _LARGEST)
    found: NDArray[np.uint32] = nearest.astype(np.float32).view(np.uint32)
    return found


def to_float(bits: Bits) -> NDArray[np.float32]:
    """The numbers that bf16 patterns stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
