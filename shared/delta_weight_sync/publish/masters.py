"""A float32 master is its published bf16 bits and 16 bits more: taken apart, and made again exactly.

bf16 is the upper half of a float32, rounded to the nearest, ties to even. So the lower half says how the
upper one was rounded, unless it is exactly in the middle, or the number is NaN: those are kept whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.checkpoint import Bits, to_nearest
from delta_weight_sync.codec import Index

Words = NDArray[np.uint32]
_MIDDLE = 0x8000
_CHUNK = 1 << 16  # elements at a time; the scratch space stays in the cache


class Rest(NamedTuple):
    """What float32 numbers have besides their bf16 cast."""

    low: Bits  # uint16 [n], the lower half of each
    odd: Index  # int64 [m], the odd ones
    words: Words  # uint32 [m], their bits


def split(masters: NDArray[np.float32]) -> Rest:
    """What must be kept beside the bf16 cast of `masters`, float32 [n]."""
    words = masters.view(np.uint32)
    low, found = np.empty(words.size, np.uint16), [np.empty(0, np.int64)]
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        low[start : start + part.size] = part  # assignment keeps the lower half
        numbers = part.view(np.float32)
        lost = join(to_nearest(numbers), low[start : start + part.size]) != part
        found.append(np.flatnonzero(lost | np.isnan(numbers)) + start)
    odd = np.concatenate(found)
    return Rest(low, odd, words[odd])


def join(published: Bits, low: Bits) -> Words:
    """The bits of the float32 numbers, but for the odd ones: uint32 of the bf16 bits and the lower halves."""
    high = published - (low > _MIDDLE)
    return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)


def masters(published: Bits, rest: Rest) -> NDArray[np.float32]:
    """The float32 numbers [n], exactly those that were split."""
    words = join(published, rest.low)
    words[rest.odd] = rest.words
    return words.view(np.float32)
