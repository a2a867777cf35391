"""Where the changes are: distances through the model, in one band or in a band per magnitude.

One band: the distance from each change to the next, which needs nothing but the stream. Eight bands: a weight
changes the more likely the smaller it is (its ULP is smaller), and the receiver knows how large it was; so
the weights of one group of exponents form a sequence of their own, each with its own rate of changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec.lanes import LANES, below, lowest, ones, select
from delta_weight_sync.codec.patch import Bits, Index
from delta_weight_sync.codec.rice import Words
from delta_weight_sync.codec.runs import BANDS, FLIPPED, RUN, State, next_run
from delta_weight_sync.kernel import kernel

Band = NDArray[np.uint8]
_ALL = np.uint64((1 << 64) - 1)
_SAMPLE = 1 << 15  # elements per tensor from which the exponents are estimated


def choose_limits(olds: Sequence[Bits], changed: Sequence[Bits]) -> list[int]:
    """Seven exponents that cut the weights into eight bands of unlike rates; 0 where fewer are enough.

    `olds`: the tensors' old bits, flat; `changed`: the old bits of their changed elements.
    """
    counts, hits = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for old, some in zip(olds, changed, strict=True):
        _count_exponents(old, max(old.size // _SAMPLE, 1), counts)
        _count_exponents(some, 1, hits)
    bands = [(e, max(int(counts[e]), int(hits[e])), int(hits[e])) for e in range(256) if counts[e] or hits[e]]
    while len(bands) > BANDS:
        costs = [_merged_cost(bands[i], bands[i + 1]) for i in range(len(bands) - 1)]
        best = costs.index(min(costs))
        first, second = bands[best : best + 2]
        bands[best : best + 2] = [(first[0], first[1] + second[1], first[2] + second[2])]
    limits = [first for first, _, _ in bands[1:]]
    return [0] * (BANDS - 1 - len(limits)) + limits


def band_table(limits: Sequence[int]) -> Band:
    """uint8 [256]: exponent -> band."""
    return np.searchsorted(np.asarray(limits), np.arange(256), side="right").astype(np.uint8)


def thresholds(limits: Sequence[int]) -> Bits:
    """uint16 [7]: the smallest magnitude of each band but the first."""
    return (np.asarray(limits, np.uint16) << 7).astype(np.uint16)


@kernel
def _count_exponents(bits: Bits, stride: int, counts: Index) -> None:
    for at in range(0, bits.size, stride):
        counts[(bits[at] >> np.uint16(7)) & np.uint16(0xFF)] += stride


def _merged_cost(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """Bits lost by coding two bands as one."""
    both = _entropy(first[1] + second[1], first[2] + second[2])
    return both - _entropy(*first[1:]) - _entropy(*second[1:])


@functools.lru_cache(4096)
def _entropy(count: int, hits: int) -> float:
    return sum(-n * math.log2(n / count) for n in (hits, count - hits) if n)


@kernel
def flat_runs(index: Index, numel: int, carried: int, out: Index) -> int:
    """Runs of one tensor into `out` [n], the first after `carried` elements; returns what it leaves."""
    before = np.int64(-1) - carried
    for j in range(index.size):
        out[j] = index[j] - before - 1
        before = index[j]
    return int(numel - 1 - before)


def blocks(bits: Bits) -> Iterator[tuple[Bits, int, np.uint64]]:
    """(bits, first position, valid lanes) of the whole blocks, and of what is left as one padded block."""
    whole = bits.size // LANES * LANES
    if whole:
        yield bits[:whole], 0, _ALL
    if rest := bits.size - whole:
        padded = np.full(LANES, 0x7FFF, np.uint16)  # in no band but the last
        padded[:rest] = bits[whole:]
        yield padded, whole, np.uint64((1 << rest) - 1)


@kernel
def band_runs(
    old: Bits,
    first: int,
    valid: np.uint64,
    limits: Bits,
    index: Index,
    carried: Index,
    filled: Index,
    out: Index,
) -> int:
    """Runs of one part of `blocks`, each into its band's part of `out`; returns how many of `index` it used.

    `carried` and `filled` [8] are carried on: unchanged elements since the last change, next place in `out`.
    """
    masks = np.empty(BANDS, np.uint64)
    at = 0
    for start in range(0, old.size, LANES):
        _split(old, start, valid, limits, masks)
        word = np.uint64(0)
        while at < index.size and index[at] < first + start + LANES:
            word |= np.uint64(1) << np.uint64(index[at] - first - start)
            at += 1
        for band in range(BANDS):
            hits = masks[band] & word
            size = ones(masks[band])
            if hits:
                size -= _note(masks[band], hits, band, carried, filled, out)
            carried[band] += size
    return at


@kernel
def _note(mask: np.uint64, hits: np.uint64, band: int, carried: Index, filled: Index, out: Index) -> int:
    """Write the runs before `hits`; returns how many elements of the block they account for."""
    passed = 0
    while hits:
        hit = hits & (~hits + np.uint64(1))
        rank = ones(mask & (hit - np.uint64(1)))
        out[filled[band]] = carried[band] + rank - passed
        filled[band] += 1
        carried[band] = 0
        passed = rank + 1
        hits ^= hit
    return passed


@kernel
def band_walk(
    words: Words,
    state: State,
    old: Bits,
    first: int,
    valid: np.uint64,
    limits: Bits,
    table: Band,
    index: Index,
    band_of: Band,
) -> int:
    """As `runs.walk` for eight bands and one part of `blocks`; `band_of` [n] gets the band of each change."""
    masks, run = np.empty(BANDS, np.uint64), state[RUN].copy()
    always = state[FLIPPED].any()
    count = 0
    for start in range(0, old.size, LANES):
        _split(old, start, valid, limits, masks)
        due = np.int64(0)
        for band in range(BANDS):
            left = run[band] - ones(masks[band])
            run[band] = left
            due |= left
        if due < 0 or always:
            word = np.uint64(0)
            for band in range(BANDS):
                hits = np.uint64(0)
                if run[band] < 0:
                    run[band], hits = _hits(words, state, band, masks[band], run[band])
                    if run[band] < 0:
                        return -1
                word |= masks[band] & ~hits if state[FLIPPED, band] else hits
            if count + ones(word) > index.size:
                return -1
            while word:
                at = start + lowest(word)
                word &= word - np.uint64(1)
                index[count] = first + at
                band_of[count] = table[(old[at] >> np.uint16(7)) & np.uint16(0xFF)]
                count += 1
    state[RUN] = run
    return count


@kernel
def _split(bits: Bits, start: int, valid: np.uint64, limits: Bits, masks: Words) -> None:
    """One bit mask per band for the 64 weights from `start`, of which the `valid` ones count."""
    lower = np.uint64(0)
    for band in range(BANDS - 1):
        upto = below(bits, start, limits[band])
        masks[band] = upto & ~lower
        lower = upto
    masks[BANDS - 1] = ~lower & valid


@kernel
def _hits(words: Words, state: State, band: int, mask: np.uint64, left: int) -> tuple[int, np.uint64]:
    """(run after the block, events in it), for a band whose run ends in the block: `left` is below zero."""
    hits = np.uint64(0)
    size = ones(mask)
    at = left + size
    while at < size:
        hits |= np.uint64(1) << np.uint64(select(mask, at))
        run = next_run(words, state, band)
        if run < 0:
            return -1, hits
        at += 1 + run
    return at - size, hits
