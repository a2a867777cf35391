"""Which weights are coded together in encoding `small`: eight bands of exponents.

A weight changes the more likely the smaller it is (its ULP is smaller), and the receiver knows how large it
was; so the weights of one band form a sequence of their own, with its own rate of changes and of large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec.lanes import BANDS
from delta_weight_sync.codec.patch import Bits, Index, Patch
from delta_weight_sync.codec.rice import MAX_K
from delta_weight_sync.kernel import kernel

Band = NDArray[np.uint8]
_WEIGHTS, _CHANGES = 1 << 16, 1 << 15  # of a group, about, from which the rates are estimated
_NEIGHBOURS = 64  # weights sampled at a time: memory comes in lines anyway


class Cut(NamedTuple):
    """`limits`: int8 [7], minus 128, as `lanes.split` takes them. `table`: uint8 [256], exponent -> band."""

    limits: NDArray[np.int8]
    table: Band


def cut(limits: Sequence[int]) -> Cut:
    """The bands that seven ascending exponents cut."""
    table = np.searchsorted(np.asarray(limits), np.arange(256), side="right")
    return Cut((np.asarray(limits) - 128).astype(np.int8), table.astype(np.uint8))


def choose_limits(olds: Sequence[Bits], patches: Sequence[Patch]) -> list[int]:
    """Seven exponents that cut the weights into eight bands of unlike rates; 0 where fewer are enough.

    `olds`: the old bits of the patches' tensors, flat.
    """
    weight_step = max(sum(old.size for old in olds) // _WEIGHTS, 1)
    change_step = max(sum(patch.index.size for patch in patches) // _CHANGES, 1)
    counts = np.zeros((3, 256), np.int64)
    for old, patch in zip(olds, patches, strict=True):
        _sample(old, patch.index, patch.ulps, weight_step, change_step, counts)
    counts[0] = np.maximum(counts[0], counts[1])
    present = np.flatnonzero(counts[0])
    limits: list[int] = present[_firsts(counts[:, present])[1:]].tolist()
    return [0] * (BANDS - 1 - len(limits)) + limits


@kernel
def exponent(bits: np.uint16) -> np.uint16:
    """Of one weight, with bias."""
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


@kernel
def _sample(
    old: Bits, index: Index, ulps: Bits, weight_step: int, change_step: int, counts: NDArray[np.int64]
) -> None:
    """Estimate, by exponent, how many weights, changes and large changes there are: `counts` [3, 256]."""
    for first in range(0, old.size, weight_step * _NEIGHBOURS):
        for at in range(first, min(first + _NEIGHBOURS, old.size)):
            counts[0, exponent(old[at])] += weight_step
    for j in range(0, index.size, change_step):
        found = exponent(old[index[j]])
        counts[1, found] += change_step
        counts[2, found] += change_step * (np.uint16(ulps[j] + 1) > 2)


@kernel
def _firsts(counts: NDArray[np.int64]) -> Index:
    """Where the bands begin that need the fewest bits, at most eight; `counts` [3, n] of ascending exponents.

    Dynamic programming: the best `used` bands up to an exponent end with some band and the best before that.
    """
    size = counts.shape[1]
    bits, begin = np.full((BANDS + 1, size + 1), np.inf), np.zeros((BANDS + 1, size + 1), np.int64)
    bits[0, 0] = 0
    for end in range(1, size + 1):
        weights, changes, large = 0, 0, 0
        for first in range(end - 1, -1, -1):
            weights, changes, large = (
                weights + counts[0, first],
                changes + counts[1, first],
                large + counts[2, first],
            )
            cost = _section(weights, changes) + _section(changes, large)
            for used in range(BANDS):
                if bits[used, first] + cost < bits[used + 1, end]:
                    bits[used + 1, end], begin[used + 1, end] = bits[used, first] + cost, first
    used = int(np.argmin(bits[:, size]))
    firsts = np.zeros(used, np.int64)
    end = size
    for band in range(used, 0, -1):
        end = int(begin[band, end])
        firsts[band - 1] = end
    return firsts


@kernel
def _section(items: int, events: int) -> float:
    """Bits of a Rice section (`runs`) if each item is an event with the same probability."""
    rare = min(events, items - events)
    if rare == 0:
        return 0.0
    best, longer = np.inf, 1.0 - rare / items  # the probability of a run of 2^k items
    for k in range(MAX_K):
        bits = rare * (k + 1 + longer / (1.0 - longer))
        if bits >= best:
            break
        best, longer = bits, longer * longer
    return best
