"""Bytes of a delta file from the share of weights that changed.

Of encoding `fast` positions and signs are computed, and only the values are calibrated:

    bits per change = distance(p) + 1 (sign) + value(p)
    distance(p) = min over k of  k + 1 / (1 - (1 - p)^(2^k))

which is the length of a Rice code with the best parameter k for distances between independent changes.
`value(p)` is what measured files have beyond that, and `small` is a measured part of `fast`; both are
interpolated in log(p). A file's table adds bytes per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from delta_weight_sync.plan import rates
from delta_weight_sync.plan.rates import Encoding, Size, Trainer


def distance_bits(share: float) -> float:
    """Bits of the distance from one change to the next, where `share` (below 1/2) of the elements changed."""
    return min(k + 1 / (1 - (1 - share) ** (1 << k)) for k in range(41))


def delta_bytes(params: float, share: float, encoding: Encoding, trainer: Trainer) -> float:
    """Size of a delta file of a model with `params` weights."""
    sizes = rates.SIZES[trainer]
    value = _interpolated(sizes, [_value_bits(size) for size in sizes], share)
    bits = distance_bits(share) + 1 + value + _table_bits(share)
    part = (
        _interpolated(sizes, [size.small / size.fast for size in sizes], share)
        if encoding == "small"
        else 1.0
    )
    return params * share * bits / 8 * part


def is_calibrated(share: float, trainer: Trainer) -> bool:
    """True where sizes were measured on both sides of `share`, or within a third of it."""
    shares = [size.share for size in rates.SIZES[trainer]]
    return shares[0] / 1.34 <= share <= shares[-1] * 1.34


def _value_bits(size: Size) -> float:
    return 8 * size.fast - distance_bits(size.share) - 1 - _table_bits(size.share)


def _table_bits(share: float) -> float:
    """Bits per change of the file's table; a tensor without changes is not listed."""
    changes = rates.WEIGHTS_PER_TENSOR * share
    return 8 * rates.TABLE_BYTES / max(changes, 1.0)


def _interpolated(sizes: Sequence[Size], values: Sequence[float], share: float) -> float:
    """`values` at `share`, linear in log(share); beyond the ends the last value."""
    at = math.log(share)
    places = [math.log(size.share) for size in sizes]
    for left, right, low, high in zip(places, places[1:], values, values[1:], strict=False):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return values[0] if at < places[0] else values[-1]
