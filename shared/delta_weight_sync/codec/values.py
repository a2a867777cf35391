"""By how much the changes move: a sign bit each, and which of them move by more than one ULP, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import positions, rice, runs
from delta_weight_sync.codec.bands import Band, cut
from delta_weight_sync.codec.lanes import BANDS
from delta_weight_sync.codec.patch import Bits, CodecError, Index
from delta_weight_sync.codec.rice import MAX_GOLOMB, Words, take_golomb
from delta_weight_sync.codec.runs import State
from delta_weight_sync.kernel import kernel

Streams = dict[str, NDArray[np.uint8]]
_UP, _DOWN = np.uint16(1), np.uint16(0xFFFF)
_BANDS = cut(range(1, BANDS))  # of weights whose exponents are bands


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
    at = np.flatnonzero((ulps != _UP) & (ulps != _DOWN))
    large, where = runs.encode(*_runs(at, band_of, bands))
    sizes = np.minimum(ulps[at], 0 - ulps[at]).astype(np.int64) - 2
    lengths, how_much = _encode_sizes(positions.by_band(sizes, band_of[at], bands))
    signs = np.packbits(ulps >= 0x8000, bitorder="little")
    return Values(large, lengths), {"signs": signs, "large": where, "sizes": how_much}


def _runs(large: Index, band_of: Band, bands: int) -> tuple[list[Index], list[int]]:
    """(runs, changes) of each band, as for the positions of changes."""
    if bands > 1:
        parts, changes, _ = positions.band_runs([_as_weights(band_of)], [large], _BANDS)
        return parts, changes
    flat = np.empty(large.size, np.int64)
    positions.flat_runs(large, band_of.size, 0, flat)
    return [flat], [band_of.size]


def _as_weights(band_of: Band) -> Bits:
    """bf16 bits whose exponents are the bands."""
    return np.left_shift(band_of, 7, dtype=np.uint16)


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
        _restore_signs(self._signs, self._read, ulps)
        large = np.empty(min(ulps.size, int((self._sizes[1] - self._sizes[0]).sum())), np.int64)
        found, bands = self._walk(band_of, large)
        if found < 0 or not _enlarge(self._size_words, self._sizes, large[:found], bands, ulps):
            raise CodecError("the sizes of the large changes are damaged")
        self._read += ulps.size
        return ulps

    def _walk(self, band_of: Band, large: Index) -> tuple[int, Band]:
        """(how many changes are large, their bands); `large` gets which."""
        bands = np.zeros(large.size, np.uint8)
        if self._state.shape[1] == 1:
            return runs.flat_walk(self._large_words, self._state, band_of.size, large), bands
        weights = _as_weights(band_of)
        return positions.band_walk(self._large_words, self._state, weights, *_BANDS, large, bands), bands

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
def _restore_signs(signs: Band, first: int, ulps: Bits) -> None:
    """Every change as if it were by one ULP."""
    for j in range(ulps.size):
        at = np.uint64(first + j)
        negative = (signs[at >> np.uint64(3)] >> np.uint8(at & np.uint64(7))) & np.uint8(1)
        ulps[j] = np.uint16(1) - np.uint16(2) * np.uint16(negative)


@kernel
def _enlarge(words: Words, sizes: State, large: Index, bands: Band, ulps: Bits) -> bool:
    """Read the sizes of the `large` changes and give them to `ulps`, which have their signs already."""
    good = True
    for i in range(large.size):
        band = bands[i]
        extra, sizes[0, band] = take_golomb(words, sizes[0, band], sizes[1, band], sizes[2, band])
        ulps[large[i]] *= np.uint16(extra + 2)  # times one or minus one, which is 2^16 - 1 here
        good &= 0 <= extra <= 32766
    return good
