"""Encodes the positions of changes as runs: the number of unchanged weights before each change.

All weights are one band, or the weights are split into eight bands, each a range of exponents. A run counts
only weights of the same band. So with eight bands, a reader needs the old weights. Eight bands take fewer
bytes, because the bands differ in their rates of changes, and of large changes (more than one ULP).

Writer and reader of eight bands both sort a chunk of weights into bands. A weight's *rank* is the number of
weights of the same band that precede the weight in the chunk. The writer finds the rank of each change, and
the reader finds the position that belongs to each rank.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec._lanes import BANDS, LANES, at_most, lowest, ones, select, split
from delta_weight_sync.codec._patch import Bits, Index, Patch
from delta_weight_sync.codec.bits import FLIPPED, LOG_LIMIT, State, Words, walk
from delta_weight_sync.kernels import kernel

Band = NDArray[np.uint8]
Floats = NDArray[np.float64]
Cut = tuple[NDArray[np.int8], Band]
Chunk = tuple[Words, NDArray[np.int16], Index]  # see `_sort`
# `choose_limits` samples about this many of a group
_WEIGHTS = 1 << 16
_CHANGES = 1 << 15
_BLOCKS = 64  # blocks in a chunk; `at_most` compares this many numbers
_CHUNK = _BLOCKS * LANES
_NONE = 1e-6  # used instead of 0 events, which would cause a division by 0
_ALL = np.uint64((1 << 64) - 1)
_AHEAD = 2  # see `_list`
_NEVER = np.int16(0x7FFF)  # above every rank in a chunk


def cut(limits: Sequence[int]) -> Cut:
    """Prepare the eight bands that seven ascending exponents separate, in the two forms that kernels need.

    Returns int8 [7], the limits minus 128 for `_lanes.split`, and uint8 [256], the band of each exponent.
    """
    table = np.searchsorted(np.asarray(limits), np.arange(256), side="right")
    return (np.asarray(limits) - 128).astype(np.int8), table.astype(np.uint8)


def choose_limits(olds: Sequence[Bits], patches: Sequence[Patch]) -> list[int]:
    """Choose seven exponents that separate the bands. With too few exponents, the list begins with zeros.

    Begins with a band for each exponent. Until eight are left, joins the two neighbours whose union takes
    the fewest additional bits. The numbers of weights, changes and large changes come from samples.
    """
    # The steps are odd, because with even steps all samples of a matrix could be from a few columns.
    weight_step = sum(old.size for old in olds) // _WEIGHTS | 1
    change_step = sum(patch.index.size for patch in patches) // _CHANGES | 1
    changed = [old[patch.index[::change_step]] for old, patch in zip(olds, patches, strict=True)]
    weights = np.concatenate([old[::weight_step] for old in olds])
    changes = np.concatenate(changed)
    amounts = np.concatenate([patch.ulps[::change_step].view(np.int16) for patch in patches])
    sampled = weights, changes, changes[(amounts != 1) & (amounts != -1)]
    counts = np.array([np.bincount(bits >> 7 & 0xFF, minlength=256) for bits in sampled], np.float64)
    counts *= [[weight_step], [change_step], [change_step]]
    counts[0] = np.maximum(counts[0], counts[1])  # the sample of weights may miss rare exponents
    firsts = np.flatnonzero(counts[0])
    bands = counts[:, firsts]
    while firsts.size > BANDS:
        bits = _bits(bands)
        joined = bands[:, :-1] + bands[:, 1:]
        best = int(np.argmin(_bits(joined) - bits[:-1] - bits[1:]))
        bands[:, best] = joined[:, best]
        bands = np.delete(bands, best + 1, 1)
        firsts = np.delete(firsts, best + 1)
    return [0] * (BANDS - firsts.size) + firsts[1:].tolist()


@kernel
def _bits(bands: Floats) -> Floats:
    """Return each band's expected bits. `bands`, [3, n]: numbers of weights, changes and large changes."""
    # Two sections per band (see `bits`): changes among the weights, and large changes among the changes.
    items = bands[:2]
    marked = bands[1:]
    events = np.minimum(marked, items - marked)  # a section lists the rarer items: marked, or not marked
    other = 1 - np.maximum(events, _NONE) / np.maximum(items, 1)  # the probability that an item is no event
    k = np.maximum(np.ceil(np.log2(LOG_LIMIT / np.log(other))), 0)
    longer = other**2**k  # the probability that a run has 2^k items or more
    return (events * (k + 1 + longer / (1 - longer))).sum(0)


@kernel
def _exponent(bits: np.uint16) -> np.uint16:
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


@kernel
def flat_runs(index: Index, numel: int, carried: int, out: Index) -> int:
    """Write the runs of a tensor's changes to `out` [n]. Return the number of elements after the last change.

    `carried`: the number that the call for the previous tensor of the group returned.
    """
    before = np.int64(-1) - carried
    for j in range(index.size):
        out[j] = index[j] - before - 1
        before = index[j]
    return int(numel - 1 - before)


@kernel
def neighbours(index: Index) -> int:
    """Count the changes whose preceding element changed, too."""
    count = 0
    for j in range(1, index.size):
        count += index[j] == index[j - 1] + 1
    return count


def band_runs(
    olds: Sequence[Bits], indices: Sequence[Index], cut: Cut
) -> tuple[list[Index], list[int], Band]:
    """Return each band's runs, each band's number of elements, and the band of each change, uint8 [n].

    `olds`, `indices`: for each tensor, its flat old bits and the positions of its changes.
    """
    changes = sum(index.size for index in indices)
    runs = np.empty(changes, np.int64)
    band_of = np.empty(changes, np.uint8)
    carried = np.zeros(BANDS, np.int64)
    elements = np.zeros(BANDS, np.int64)
    first = 0
    for old, index in zip(olds, indices, strict=True):
        _band_runs(old, cut, index, carried, elements, runs[first:], band_of[first:])
        first += index.size
    return by_band(runs, band_of, BANDS), elements.tolist(), band_of


def by_band(numbers: Index, band_of: Band, bands: int) -> list[Index]:
    """Split `numbers` by band, and keep their order."""
    ends = np.bincount(band_of, minlength=bands).cumsum()
    return np.split(numbers[np.argsort(band_of, kind="stable")], ends[:-1])


@kernel
def band_walk(words: Words, state: State, old: Bits, cut: Cut, index: Index, band_of: Band) -> int:
    """Write each change's position to `index`, its band to `band_of`. Return their number; -1: damaged."""
    chunk = _empty_chunk()
    ranks = np.empty(_CHUNK, np.int64)
    marked = np.empty(_BLOCKS, np.uint64)
    found = 0
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], cut[0], chunk)
        if not _mark(words, state, chunk, ranks, marked):
            return -1
        first = found
        found = _list(marked, start, index, found)
        for j in range(first, found):
            band_of[j] = cut[1][_exponent(old[index[j]])]
        if found < 0:
            return -1
    return found


@kernel
def _empty_chunk() -> Chunk:
    masks = np.empty((_BLOCKS, BANDS), np.uint64)
    before = np.empty((BANDS, _BLOCKS), np.int16)
    return masks, before, np.empty(BANDS, np.int64)


@kernel
def _sort(old: Bits, limits: NDArray[np.int8], chunk: Chunk) -> None:
    """Sort a chunk of weights into bands: fill `masks` [64, 8], `before` [8, 64] and `totals` [8] of `chunk`.

    For each block of 64 weights and each band, `masks` says which weights are in the band, and `before` how
    many weights of the band precede the block. `totals` counts the weights of each band in the chunk.
    """
    masks, before, totals = chunk
    totals[:] = 0
    whole = old.size // LANES
    for block in range(whole):
        split(old, block * LANES, _ALL, limits, masks[block])
        _count(masks[block], before[:, block], totals)
    masks[whole:] = 0
    before[:, whole:] = _NEVER
    rest = old.size - whole * LANES
    if rest > 0:
        # `split` clears the bits of padding in the last band only. So the padding must be in that band.
        padded = np.full(LANES, 0x7FFF, np.uint16)
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
    old: Bits, cut: Cut, index: Index, carried: Index, elements: Index, runs: Index, band_of: Band
) -> None:
    """Write the run and the band of each change of a tensor. Also update, for each band, `carried` (weights
    since the last change) and `elements` (all weights)."""
    chunk = _empty_chunk()
    at = 0
    masks, before, totals = chunk
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], cut[0], chunk)
        while at < index.size and index[at] < start + _CHUNK:
            place = index[at] - start
            band = cut[1][_exponent(old[index[at]])]
            block = place // LANES
            lower = (np.uint64(1) << np.uint64(place % LANES)) - np.uint64(1)
            rank = before[band, block] + ones(masks[block, band] & lower)
            runs[at] = carried[band] + rank
            band_of[at] = band
            carried[band] = -1 - rank  # adding the next change's rank gives the weights between the two
            at += 1
        for band in range(BANDS):
            carried[band] += totals[band]
            elements[band] += totals[band]


@kernel
def _mark(words: Words, state: State, chunk: Chunk, ranks: Index, marked: Words) -> bool:
    """Set the bits of a chunk's changes in `marked` [64]; False if a section is damaged."""
    masks, before, totals = chunk
    marked[:] = 0
    for band in range(BANDS):
        if state[FLIPPED, band]:  # the events are unchanged weights: mark all; the loop below unmarks them
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
    """Append the positions of `marked` weights to `index`. Return the new `found`; -1 if `index` is full."""
    for block in range(_BLOCKS):
        word = marked[block]
        end = found + ones(marked[block])
        if end > index.size:
            return -1
        start = first + block * LANES
        # Always write `_AHEAD` positions, because the CPU would mispredict a branch on the number of changes.
        # If the block has fewer changes, the next block overwrites the surplus.
        if found + _AHEAD <= index.size:
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
