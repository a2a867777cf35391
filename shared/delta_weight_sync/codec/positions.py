"""Where the changes are: distances through the model, in one band or in a band per magnitude.

One band: the distance from each change to the next, which needs nothing but the stream. Eight bands: the
distance to the next change of a weight of like magnitude, which needs the old weights (`bands`).

A chunk of weights is sorted into bands before anything is known of its changes; then each change is looked up
by where it is (writing), or by which one of its band it is (reading).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec.bands import Band, Cut, exponent
from delta_weight_sync.codec.lanes import BANDS, LANES, at_most, lowest, ones, select, split
from delta_weight_sync.codec.patch import Bits, Index
from delta_weight_sync.codec.rice import Words
from delta_weight_sync.codec.runs import FLIPPED, State, walk
from delta_weight_sync.kernel import kernel

_BLOCKS = 64  # of a chunk: as many as `at_most` compares
_CHUNK = _BLOCKS * LANES
_ALL = np.uint64((1 << 64) - 1)
_AHEAD = 2  # positions written for a block that may have fewer
_NEVER = np.int16(0x7FFF)  # more than a chunk has weights


@kernel
def flat_runs(index: Index, numel: int, carried: int, out: Index) -> int:
    """Runs of one tensor into `out` [n], the first after `carried` elements; returns what it leaves."""
    before = np.int64(-1) - carried
    for j in range(index.size):
        out[j] = index[j] - before - 1
        before = index[j]
    return int(numel - 1 - before)


@kernel
def neighbours(index: Index) -> int:
    """How many changes follow another one at once."""
    count = 0
    for j in range(1, index.size):
        count += index[j] == index[j - 1] + 1
    return count


def band_runs(
    olds: Sequence[Bits], indices: Sequence[Index], cut: Cut
) -> tuple[list[Index], list[int], Band]:
    """Runs of each of eight bands, elements of each, and uint8 [n], the band of every change.

    `olds` and `indices`: old bits and positions of the changes by tensor, flat.
    """
    changes = sum(index.size for index in indices)
    runs, band_of = np.empty(changes, np.int64), np.empty(changes, np.uint8)
    carried, elements, first = np.zeros(BANDS, np.int64), np.zeros(BANDS, np.int64), 0
    for old, index in zip(olds, indices, strict=True):
        _band_runs(old, *cut, index, carried, elements, runs[first:], band_of[first:])
        first += index.size
    return by_band(runs, band_of, BANDS), elements.tolist(), band_of


def by_band(numbers: Index, band_of: Band, bands: int) -> list[Index]:
    """The numbers of each band, in their order."""
    out, ends = np.empty_like(numbers), np.zeros(bands, np.int64)
    _place(numbers, band_of, ends, out)
    return np.split(out, ends[:-1])


@kernel
def band_walk(
    words: Words,
    state: State,
    old: Bits,
    limits: NDArray[np.int8],
    table: Band,
    index: Index,
    band_of: Band,
) -> int:
    """As `runs.walk` for eight bands of `old` [numel]; `band_of` [n] gets the band of each change."""
    masks, before = np.empty((_BLOCKS, BANDS), np.uint64), np.empty((BANDS, _BLOCKS), np.int16)
    totals, ranks = np.empty(BANDS, np.int64), np.empty(_CHUNK, np.int64)
    marked = np.empty(_BLOCKS, np.uint64)
    found = 0
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], limits, masks, before, totals)
        if not _mark(words, state, masks, before, totals, ranks, marked):
            return -1
        listed, found = found, _list(marked, start, index, found)
        for j in range(listed, found):
            band_of[j] = table[exponent(old[index[j]])]
        if found < 0:
            return -1
    return found


@kernel
def _sort(
    old: Bits, limits: NDArray[np.int8], masks: Words, before: NDArray[np.int16], totals: Index
) -> None:
    """Which weights of a chunk are in each band.

    `masks` [64, 8]: of each block of 64 weights; `before` [8, 64]: how many precede the block; `totals` [8].
    """
    totals[:] = 0
    whole = old.size // LANES
    for block in range(whole):
        split(old, block * LANES, _ALL, limits, masks[block])
        _count(masks[block], before[:, block], totals)
    masks[whole:], before[:, whole:] = 0, _NEVER
    rest = old.size - whole * LANES
    if rest > 0:
        padded = np.full(LANES, 0x7FFF, np.uint16)  # in no band but the last
        padded[:rest] = old[whole * LANES :]
        split(padded, 0, (np.uint64(1) << np.uint64(rest)) - np.uint64(1), limits, masks[whole])
        _count(masks[whole], before[:, whole], totals)


@kernel
def _count(masks: Words, before: NDArray[np.int16], totals: Index) -> None:
    for band in range(BANDS):
        before[band] = totals[band]
        totals[band] += ones(masks[band])


@kernel
def _band_runs(
    old: Bits,
    limits: NDArray[np.int8],
    table: Band,
    index: Index,
    carried: Index,
    elements: Index,
    runs: Index,
    band_of: Band,
) -> None:
    """Runs and bands of one tensor's changes.

    Carried on by band [8]: `carried`, elements since the last change, and `elements`, all so far.
    """
    masks, before = np.empty((_BLOCKS, BANDS), np.uint64), np.empty((BANDS, _BLOCKS), np.int16)
    totals = np.empty(BANDS, np.int64)
    at = 0
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], limits, masks, before, totals)
        while at < index.size and index[at] < start + _CHUNK:
            place = index[at] - start
            band, block = table[exponent(old[index[at]])], place // LANES
            lower = (np.uint64(1) << np.uint64(place % LANES)) - np.uint64(1)
            rank = before[band, block] + ones(masks[block, band] & lower)
            runs[at], band_of[at] = carried[band] + rank, band
            carried[band] = -1 - rank  # as if the chunk began after this change
            at += 1
        for band in range(BANDS):
            carried[band] += totals[band]
            elements[band] += totals[band]


@kernel
def _place(numbers: Index, band_of: Band, ends: Index, out: Index) -> None:
    """Numbers of a band side by side in `out`; `ends` [bands], zeros before, gets where each band ends."""
    for band in band_of:
        ends[band] += 1
    total = 0
    for band in range(ends.size):
        ends[band], total = total, total + ends[band]
    for j in range(numbers.size):
        out[ends[band_of[j]]] = numbers[j]
        ends[band_of[j]] += 1


@kernel
def _mark(
    words: Words,
    state: State,
    masks: Words,
    before: NDArray[np.int16],
    totals: Index,
    ranks: Index,
    marked: Words,
) -> bool:
    """Set the bits of a chunk's changes in `marked` [64]; False if a section is damaged."""
    marked[:] = 0
    for band in range(BANDS):
        if state[FLIPPED, band]:
            marked ^= masks[:, band]
        count = walk(words, state, band, totals[band], ranks)
        if count < 0:
            return False
        for j in range(count):
            block = ones(at_most(before[band], ranks[j])) - 1
            lane = select(masks[block, band], ranks[j] - before[band, block])
            marked[block] ^= np.uint64(1) << np.uint64(lane)
    return True


@kernel
def _list(marked: Words, first: int, index: Index, found: int) -> int:
    """Append the positions of the `marked` weights of a chunk; returns how many there are, -1 if too many."""
    for block in range(_BLOCKS):
        word, end = marked[block], found + ones(marked[block])
        if end > index.size:
            return -1
        start = first + block * LANES
        if found + _AHEAD <= index.size:  # no branch on how few there are: it would often be guessed wrong
            for j in range(_AHEAD):
                index[found + j] = start + lowest(word)
                word &= word - np.uint64(1)
            found += _AHEAD
        while word:
            index[found] = start + lowest(word)
            word &= word - np.uint64(1)
            found += 1
        found = end
    return found
