"""Encodes the positions of changes as runs: the number of unchanged weights before each change.

With one band, a run counts all weights since the last change. With eight bands, a run counts only weights
of the same band, which is a range of exponents, so a reader needs the old weights. That takes fewer bytes,
because the rates of changes, and of large changes (more than one ULP), differ by band.

Both directions sort a chunk of weights into bands. Then writing finds the rank of each change in its band,
and reading finds the position of each rank.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec._lanes import BANDS, LANES, at_most, lowest, ones, select, split
from delta_weight_sync.codec._patch import Bits, Index, Patch
from delta_weight_sync.codec.bits import FLIPPED, MAX_K, State, Words, walk
from delta_weight_sync.util import kernel

Band = NDArray[np.uint8]
Cut = tuple[NDArray[np.int8], Band]
Chunk = tuple[Words, NDArray[np.int16], Index]  # see `_sort`
_WEIGHTS, _CHANGES = 1 << 16, 1 << 15  # about this many of a group are sampled for rates
_NEIGHBOURS = 64  # consecutive weights per sample: the CPU loads whole cache lines anyway
_BLOCKS = 64  # blocks in a chunk: as many as `at_most` compares
_CHUNK = _BLOCKS * LANES
_ALL = np.uint64((1 << 64) - 1)
_AHEAD = 2  # positions written for each block even if it has fewer changes
_NEVER = np.int16(0x7FFF)  # above every rank in a chunk


def cut(limits: Sequence[int]) -> Cut:
    """Prepare the eight bands that seven ascending exponents separate, in the two forms that kernels need.

    Returns int8 [7], the limits minus 128 for `_lanes.split`, and uint8 [256], the band of each exponent.
    """
    table = np.searchsorted(np.asarray(limits), np.arange(256), side="right")
    return (np.asarray(limits) - 128).astype(np.int8), table.astype(np.uint8)


def choose_limits(olds: Sequence[Bits], patches: Sequence[Patch]) -> list[int]:
    """Choose the exponents that separate the bands. Some are 0 if fewer than eight bands are best."""
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
def _exponent(bits: np.uint16) -> np.uint16:
    """The biased exponent of one weight."""
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


@kernel
def _sample(
    old: Bits, index: Index, ulps: Bits, weight_step: int, change_step: int, counts: NDArray[np.int64]
) -> None:
    """Estimate the weights, changes and large changes of each exponent: `counts` [3, 256]."""
    for first in range(0, old.size, weight_step * _NEIGHBOURS):
        for at in range(first, min(first + _NEIGHBOURS, old.size)):
            counts[0, _exponent(old[at])] += weight_step
    for j in range(0, index.size, change_step):
        found = _exponent(old[index[j]])
        counts[1, found] += change_step
        counts[2, found] += change_step * (np.uint16(ulps[j] + 1) > 2)


@kernel
def _firsts(counts: NDArray[np.int64]) -> Index:
    """Split n exponents into at most eight bands that need the fewest bits in all; `counts` [3, n] is that of
    `_sample`. Returns the index at which each band starts.

    Dynamic programming: the best split into m bands is a best split of a prefix into m - 1, and a last band.
    """
    size = counts.shape[1]
    bits, begin = np.full((BANDS + 1, size + 1), np.inf), np.zeros((BANDS + 1, size + 1), np.int64)
    bits[0, 0] = 0
    for end in range(1, size + 1):
        weights, changes, large = 0, 0, 0
        for first in range(end - 1, -1, -1):
            weights += counts[0, first]
            changes += counts[1, first]
            large += counts[2, first]
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
    """Expected bits of a Rice section if each item is an event with the probability events / items."""
    rare = min(events, items - events)
    if rare == 0:
        return 0.0
    best, longer = np.inf, 1.0 - rare / items  # the probability that a run has 2^k items or more
    for k in range(MAX_K):
        bits = rare * (k + 1 + longer / (1.0 - longer))
        if bits >= best:
            break
        best, longer = bits, longer * longer
    return best


@kernel
def flat_runs(index: Index, numel: int, carried: int, out: Index) -> int:
    """Write a tensor's runs to `out` [n]; returns the number of elements since the last change.

    `carried`: the same number at the end of the previous tensor.
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
    runs, band_of = np.empty(changes, np.int64), np.empty(changes, np.uint8)
    carried, elements, first = np.zeros(BANDS, np.int64), np.zeros(BANDS, np.int64), 0
    for old, index in zip(olds, indices, strict=True):
        _band_runs(old, cut, index, carried, elements, runs[first:], band_of[first:])
        first += index.size
    return by_band(runs, band_of, BANDS), elements.tolist(), band_of


def by_band(numbers: Index, band_of: Band, bands: int) -> list[Index]:
    """Split `numbers` by band, and keep their order."""
    out, ends = np.empty_like(numbers), np.zeros(bands, np.int64)
    _place(numbers, band_of, ends, out)
    return np.split(out, ends[:-1])


@kernel
def band_walk(words: Words, state: State, old: Bits, cut: Cut, index: Index, band_of: Band) -> int:
    """Like `bits.walk`, for the eight bands of `old` [numel]; writes each change's band to `band_of` [n]."""
    chunk, ranks, marked = _empty_chunk(), np.empty(_CHUNK, np.int64), np.empty(_BLOCKS, np.uint64)
    found = 0
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], cut[0], chunk)
        if not _mark(words, state, chunk, ranks, marked):
            return -1
        listed, found = found, _list(marked, start, index, found)
        for j in range(listed, found):
            band_of[j] = cut[1][_exponent(old[index[j]])]
        if found < 0:
            return -1
    return found


@kernel
def _empty_chunk() -> Chunk:
    masks, before = np.empty((_BLOCKS, BANDS), np.uint64), np.empty((BANDS, _BLOCKS), np.int16)
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
    masks[whole:], before[:, whole:] = 0, _NEVER
    rest = old.size - whole * LANES
    if rest > 0:
        padded = np.full(LANES, 0x7FFF, np.uint16)  # the padding is in the last band, where it is masked
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
    """Write the run and the band of each change of a tensor.

    Update, for each band, `carried` (its weights since its last change) and `elements` (all its weights).
    """
    chunk, at = _empty_chunk(), 0
    masks, before, totals = chunk
    for start in range(0, old.size, _CHUNK):
        _sort(old[start : start + _CHUNK], cut[0], chunk)
        while at < index.size and index[at] < start + _CHUNK:
            place = index[at] - start
            band, block = cut[1][_exponent(old[index[at]])], place // LANES
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
    """Write `numbers` to `out`, grouped by band. `ends` [bands], zeros at first, gets each group's end."""
    for band in band_of:
        ends[band] += 1
    total = 0
    for band in range(ends.size):
        ends[band], total = total, total + ends[band]
    for j in range(numbers.size):
        out[ends[band_of[j]]] = numbers[j]
        ends[band_of[j]] += 1


@kernel
def _mark(words: Words, state: State, chunk: Chunk, ranks: Index, marked: Words) -> bool:
    """Set the bits of a chunk's changes in `marked` [64]; False if a section is damaged."""
    masks, before, totals = chunk
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
    """Append the positions of a chunk's `marked` weights to `index`. Returns its new count, -1 if full."""
    for block in range(_BLOCKS):
        word, end = marked[block], found + ones(marked[block])
        if end > index.size:
            return -1
        start = first + block * LANES
        if found + _AHEAD <= index.size:  # a branch on the number of changes would often be mispredicted
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
