"""By how much the changes move: a sign bit each, and which of them move by more than one ULP, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import rice, runs
from delta_weight_sync.codec.patch import Bits, CodecError, Index
from delta_weight_sync.codec.positions import Band
from delta_weight_sync.codec.rice import MAX_GOLOMB, Words, take_golomb
from delta_weight_sync.codec.runs import FLIPPED, LEFT, RUN, State, next_run
from delta_weight_sync.kernel import kernel

Streams = dict[str, NDArray[np.uint8]]


class Large(NamedTuple):
    """The changes of one band by more than one ULP: their Exp-Golomb parameter and section length."""

    k: int
    bits: int


class Values(NamedTuple):
    """The values of a group: per band, where the large changes are, and how large."""

    large: Sequence[tuple[int, int, bool, int]]
    sizes: Sequence[tuple[int, int]]


def encode(ulps: Bits, band_of: Band, bands: int) -> tuple[Values, Streams]:
    """Code `ulps` [n]; `band_of` [n] tells the band of each."""
    totals = np.bincount(band_of, minlength=bands)
    starts = np.concatenate([[0], np.cumsum(totals)[:-1]])
    gaps, sizes = np.empty(ulps.size, np.int64), np.empty(ulps.size, np.int64)
    signs, filled = np.zeros(ulps.size // 8 + 1, np.uint8), starts.copy()
    _collect(ulps, band_of, np.zeros(bands, np.int64), filled, gaps, sizes, signs)
    spans = [slice(a, b) for a, b in zip(starts, filled, strict=True)]
    large, where = runs.encode([gaps[span] for span in spans], totals.tolist())
    lengths, how_much = _encode_sizes([sizes[span] for span in spans])
    streams = {"signs": signs[: (ulps.size + 7) // 8], "large": where, "sizes": how_much}
    return Values(large, lengths), streams


def _encode_sizes(bands: Sequence[Index]) -> tuple[list[Large], NDArray[np.uint8]]:
    lengths = [Large(*rice.golomb_k(numbers)) for numbers in bands]
    words = np.zeros(sum(length.bits for length in lengths) // 64 + 2, np.uint64)
    at = 0
    for numbers, length in zip(bands, lengths, strict=True):
        at = rice.put_golomb(numbers, length.k, words, at)
    return lengths, rice.to_bytes(words, at)


class Reader:
    """Reads the values of a group, tensor after tensor."""

    def __init__(self, values: Values, streams: Streams, changes: int) -> None:
        if streams["signs"].size != (changes + 7) // 8:
            raise CodecError(f"{streams['signs'].size} bytes of signs for {changes} changes")
        self._signs, self._read = streams["signs"], 0
        self._state = runs.reader(values.large, streams["large"].size)
        self._sizes = _size_state(values.sizes, streams["sizes"].size)
        self._large_words, self._size_words = (rice.to_words(streams[key]) for key in ("large", "sizes"))
        if not runs.start(self._large_words, self._state):
            raise CodecError("the section of large changes is damaged")

    def read(self, band_of: Band) -> Bits:
        """The ULPs of the next `band_of.size` changes."""
        ulps = np.empty(band_of.size, np.uint16)
        where, how_much = (self._large_words, self._state), (self._size_words, self._sizes)
        _restore_signs(self._signs, self._read, ulps)
        if self._state.shape[1] == 1:
            large = np.empty(min(ulps.size, self._most_large()), np.int64)
            count = runs.walk(*where, ulps.size, large)
            good = count >= 0 and _restore_flat(*how_much, large[:count], ulps)
        else:
            good = _restore_bands(*where, *how_much, band_of, ulps)
        if not good:
            raise CodecError("the sizes of the large changes are damaged")
        self._read += ulps.size
        return ulps

    def _most_large(self) -> int:
        """Of a single band: how many large changes there may still be."""
        size_bits = int(self._sizes[1, 0] - self._sizes[0, 0])
        return size_bits if self._state[FLIPPED, 0] else int(self._state[LEFT, 0]) + 1

    def finished(self) -> bool:
        """True if every value was read."""
        return runs.finished(self._state) and bool((self._sizes[0] == self._sizes[1]).all())


def _size_state(sizes: Sequence[tuple[int, int]], stream_bytes: int) -> State:
    """int64 [3, bands]: next bit, end, parameter."""
    state = np.zeros((3, len(sizes)), np.int64)
    at = 0
    for band, (k, bits) in enumerate(sizes):
        if not (0 <= k <= MAX_GOLOMB and 0 <= bits <= 8 * stream_bytes - at):
            raise CodecError(f"a section of {bits} bits does not fit its stream")
        state[:, band] = (at, at + bits, k)
        at += bits
    return state


@kernel
def _collect(
    ulps: Bits, band_of: Band, passed: Index, filled: Index, gaps: Index, sizes: Index, signs: Band
) -> None:
    for j in range(ulps.size):
        value = np.int64(ulps[j])
        negative = value >= 32768
        size = 65536 - value if negative else value
        signs[j >> 3] |= np.uint8(negative) << np.uint8(j & 7)
        band = band_of[j]
        if size > 1:
            gaps[filled[band]] = passed[band]
            sizes[filled[band]] = size - 2
            filled[band] += 1
            passed[band] = 0
        else:
            passed[band] += 1


@kernel
def _restore_signs(signs: Band, first: int, ulps: Bits) -> None:
    """Every change as if it were by one ULP."""
    for j in range(ulps.size):
        at = np.uint64(first + j)
        negative = (signs[at >> np.uint64(3)] >> np.uint8(at & np.uint64(7))) & np.uint8(1)
        ulps[j] = np.uint16(1) - np.uint16(2) * np.uint16(negative)


@kernel
def _enlarge(size_words: Words, sizes: State, band: int, ulps: Bits, j: int) -> bool:
    """Read the size of a large change and give it to change `j`, which has its sign already."""
    extra, sizes[0, band] = take_golomb(size_words, sizes[0, band], sizes[1, band], sizes[2, band])
    ulps[j] *= np.uint16(extra + 2)  # times one or minus one, which is 2^16 - 1 here
    return 0 <= extra <= 32766


@kernel
def _restore_flat(size_words: Words, sizes: State, large: Index, ulps: Bits) -> bool:
    good = True
    for j in large:
        good &= _enlarge(size_words, sizes, 0, ulps, j)
    return good


@kernel
def _restore_bands(
    words: Words, state: State, size_words: Words, sizes: State, band_of: Band, ulps: Bits
) -> bool:
    for j in range(ulps.size):
        band = band_of[j]
        event = state[RUN, band] == 0
        state[RUN, band] = next_run(words, state, band) if event else state[RUN, band] - 1
        if event != (state[FLIPPED, band] != 0) and not _enlarge(size_words, sizes, band, ulps, j):
            return False
        if state[RUN, band] < 0:
            return False
    return True
