"""Bit streams of the codec: Rice codes for distances, Exp-Golomb codes for magnitudes.

`docs/wire-format.md` describes both codes. A stream is little-endian 64-bit words, filled from the lowest
bit. For distances between independent events, a Rice code is within 4.3 % of the entropy, and within 2.2 %
if at most a tenth of the items are events.

A *band* is a sequence of items, some of which are marked. Either the items are weights, and the changed
weights are marked; or the items are changes, and the large changes are marked. The *events* of a band are the
marked items. But if more than half of the items are marked, the band is `flipped`, and its events are the
items that are not marked. A *run* is the number of items between two events. The coded runs of a band are a
*section* of a stream. Readers step through up to eight bands in parallel.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec._lanes import length, lowest
from delta_weight_sync.codec._patch import Index
from delta_weight_sync.errors import CodecError
from delta_weight_sync.kernels import kernel

MAX_K = 40  # largest k of a Rice code
# The best Rice parameter k is the smallest with p ** 2**k <= exp(LOG_LIMIT), where p is the probability that
# an item is no event (Gallager and Van Voorhis, 1975).
LOG_LIMIT = math.log((math.sqrt(5) - 1) / 2)
MAX_GOLOMB = 14  # largest k of an Exp-Golomb code
FAR = 1 << 62  # a run longer than any sequence: no further event follows
_PART = 4096  # a flipped band is read this many items at a time
# Rows of a reader's state: bit of the next remainder, bit of the next quotient, bit after the section; k;
# number of runs not read yet, number of items before the next event, whether the band is flipped.
REMAINDER, QUOTIENT, END, K, LEFT, RUN, FLIPPED = range(7)
Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]
State = NDArray[np.int64]


@kernel
def rice_k(numbers: Numbers) -> tuple[int, int]:
    """Return (k, bits): the best k for runs between independent events, and the length of their section."""
    total = np.int64(0)
    k = 0
    for number in numbers:
        total += number
    if total > 0:
        k = min(max(math.ceil(math.log2(-LOG_LIMIT / math.log1p(numbers.size / total))), 0), MAX_K)
    bits = np.int64(numbers.size) * (k + 1)
    for number in numbers:
        bits += number >> k
    return k, int(bits)


@kernel
def put_rice(numbers: Numbers, k: int, words: Words, at: int) -> int:
    """Write a section (all remainders, then all quotients) at bit `at` of zeroed `words`; return its end."""
    _put_remainders(numbers, k, words, at)
    at += k * numbers.size
    place = at >> 6
    word = words[at >> 6]
    for number in numbers:
        at += number >> k
        if at >> 6 != place:
            words[place] = word
            place = at >> 6
            word = np.uint64(0)
        word |= np.uint64(1) << np.uint64(at & 63)
        at += 1
    words[place] = word
    return at


@kernel
def _put_remainders(numbers: Numbers, k: int, words: Words, at: int) -> None:
    place = at >> 6
    filled = at & 63
    word = words[at >> 6]
    for number in numbers:
        remainder = np.uint64(number & ((1 << k) - 1))
        word |= remainder << np.uint64(filled)
        filled += k
        if filled >= 64:
            words[place] = word
            place += 1
            filled = filled - 64
            word = remainder >> np.uint64(k - filled)
    words[place] = word


@kernel
def _peek(words: Words, at: int) -> np.uint64:
    """Return 64 bits from bit `at` on. The word that holds bit `at` and the next word must exist."""
    number = np.uint64(at) >> np.uint64(6)
    shift = np.uint64(at) & np.uint64(63)
    after = words[number + np.uint64(1)] << np.uint64(1)  # two shifts, because a shift by 64 is undefined
    return words[number] >> shift | after << (np.uint64(63) - shift)


@kernel
def take(words: Words, at: int, bits: int) -> int:
    """Like `_peek`, but only `bits` bits (0 to 63)."""
    return int(_peek(words, at) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@kernel
def next_one(words: Words, at: int, end: int) -> int:
    """Position of the first set bit from `at` on; `end` if there is none before `end`."""
    word = _peek(words, at)
    while word == 0 and at < end:
        at += 64
        word = _peek(words, at)
    return min(at + lowest(word), end)


@kernel
def golomb_k(numbers: Numbers) -> tuple[int, int]:
    """Return (k, bits): the k that makes the Exp-Golomb section of `numbers` shortest, and its length."""
    best_k = 0
    best_bits = np.int64(-1)
    for k in range(MAX_GOLOMB + 1):
        bits = np.int64(0)
        for number in numbers:
            bits += 2 * length(np.uint64(number) + (np.uint64(1) << np.uint64(k)))
        bits -= np.int64(numbers.size) * (k + 1)
        if best_bits >= 0 and bits > best_bits:
            break  # as k grows, the length has a single minimum
        best_k = k
        best_bits = bits
    return best_k, int(best_bits)


@kernel
def put_golomb(numbers: Numbers, k: int, words: Words, at: int) -> int:
    """Write an Exp-Golomb section at bit `at` of zeroed `words`; return the bit after the section."""
    for number in numbers:
        shifted = np.uint64(number) + (np.uint64(1) << np.uint64(k))
        rest = length(shifted) - 1
        at += rest - k
        words[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        at = _put(shifted ^ (np.uint64(1) << np.uint64(rest)), rest, words, at + 1)
    return at


@kernel
def take_golomb(words: Words, at: int, end: int, k: int) -> tuple[int, int]:
    """Read the Exp-Golomb code at bit `at`. Return (number, bit after the code); if damaged, (-1, at)."""
    one = next_one(words, at, end)
    bits = one - at + k
    if one == end or bits > MAX_K or one + 1 + bits > end:
        return -1, at
    rest = take(words, one + 1, bits)
    return int(rest + (np.int64(1) << bits) - (np.int64(1) << k)), one + 1 + bits


@kernel
def _put(value: np.uint64, bits: int, words: Words, at: int) -> int:
    if bits == 0:
        return at
    shift = np.uint64(at & 63)
    words[at >> 6] |= value << shift
    if shift + np.uint64(bits) > np.uint64(64):
        words[(at >> 6) + 1] |= value >> (np.uint64(64) - shift)
    return at + bits


def to_words(stream: NDArray[np.uint8]) -> Words:
    """The stream's bytes as words, then at least two words of zeros, because readers look ahead."""
    words = np.zeros(stream.size // 8 + 3, np.uint64)
    words.view(np.uint8)[: stream.size] = stream
    return words


def to_bytes(words: Words, bits: int) -> NDArray[np.uint8]:
    """The first `bits` bits of `words`, as whole bytes."""
    return words.view(np.uint8)[: (bits + 7) // 8]


class Section(NamedTuple):
    """The coded runs of one band: one run per event, as Rice codes with parameter `k`, in `bits` bits."""

    events: int
    k: int
    flipped: bool
    bits: int


def encode_runs(bands: Sequence[Numbers], totals: Sequence[int]) -> tuple[list[Section], NDArray[np.uint8]]:
    """Encode bands. `bands[b]`: the run before each marked item of band b; `totals[b]`: number of items."""
    sections = list[Section]()
    coded = list[Numbers]()
    for runs, total in zip(bands, totals, strict=True):
        flip = 2 * runs.size > total
        coded.append(_flipped(runs, total) if flip else runs)
        k, bits = rice_k(coded[-1])
        sections.append(Section(coded[-1].size, k, flip, bits))
    words = np.zeros(sum(section.bits for section in sections) // 64 + 2, np.uint64)
    at = 0
    for runs, section in zip(coded, sections, strict=True):
        at = put_rice(runs, section.k, words, at)
    return sections, to_bytes(words, at)


def open_runs(
    sections: Sequence[tuple[int, int, bool, int]], stream: NDArray[np.uint8], what: str
) -> tuple[Words, State]:
    """Return the words of a stream, and the state of a reader before the first item: int64 [7, bands].

    Raises `CodecError` if a section does not fit or begins with a damaged run. `what`: name for messages.
    """
    words = to_words(stream)
    state = np.zeros((7, len(sections)), np.int64)
    at = 0
    for band, (events, k, flipped, bits) in enumerate(sections):
        if not (0 <= k <= MAX_K and 0 <= events * (k + 1) <= bits <= 8 * stream.size - at):
            raise CodecError(f"a section of {events} events in {bits} bits does not fit its stream")
        # Pretend that an event lies just before item 0. Then `walk` over 0 items passes this event, and reads
        # the distance to the first real event into RUN.
        state[:, band] = (at, at + events * k, at + bits, k, events, -1, flipped)
        if walk(words, state, band, 0, np.empty(1, np.int64)) < 0:
            raise CodecError(f"the section of {what} is damaged")
        at += bits
    return words, state


@kernel
def walk(words: Words, state: State, band: int, numel: int, index: Index) -> int:
    """Write the positions of events in a band's next `numel` items. Return their number; -1: damaged."""
    # keeps the state in registers
    count = 0
    at = state[RUN, band]
    k = state[K, band]
    left = state[LEFT, band]
    remainder = state[REMAINDER, band]
    quotient = state[QUOTIENT, band]
    end = state[END, band]
    number = quotient >> 6
    word = words[number] >> np.uint64(quotient & 63) << np.uint64(quotient & 63)
    while at < numel:
        if count == index.size:
            return -1
        index[count] = at
        count += 1
        if left == 0:
            at += 1 + FAR
            break
        left -= 1
        while word == 0 and (number + 1) << 6 < end:
            number += 1
            word = words[number]
        one = (number << 6) + lowest(word)
        zeros = one - quotient
        if word == 0 or one >= end or zeros >> (60 - k) != 0:  # if not 0, `zeros << k` would overflow
            return -1
        word &= word - np.uint64(1)
        at += 1 + (zeros << k) + take(words, remainder, k)
        remainder += k
        quotient = one + 1
    state[RUN, band] = at - numel
    state[LEFT, band] = left
    state[REMAINDER, band] = remainder
    state[QUOTIENT, band] = quotient
    return count


@kernel
def flat_walk(words: Words, state: State, numel: int, index: Index) -> int:
    """Like `walk` for a single band, but write the positions of marked items, even if the band is flipped."""
    if not state[FLIPPED, 0]:
        return walk(words, state, 0, numel, index)
    unmarked = np.empty(_PART, np.int64)
    found = 0
    for start in range(0, numel, _PART):
        size = min(_PART, numel - start)
        events = walk(words, state, 0, size, unmarked)
        at = 0
        if events < 0 or found + size - events > index.size:
            return -1
        for j in range(events + 1):
            end = unmarked[j] if j < events else size
            for marked in range(at, end):
                index[found + marked - j] = start + marked
            at = end + 1
        found += size - events
    return found


def finished(state: State) -> bool:
    """Whether every run has been read, and no event lies after the last item."""
    return bool((state[LEFT] == 0).all() and (state[RUN] > FAR >> 1).all())


@kernel
def _flipped(runs: Numbers, total: int) -> Numbers:
    """Return the runs of a flipped band: how many marked items directly precede each unmarked item."""
    flipped = np.zeros(total - runs.size, np.int64)
    at = 0
    marked = 0
    for run in runs:
        if run > 0:
            flipped[at] = marked
            at += run
            marked = 0
        marked += 1
    if at < flipped.size:
        flipped[at] = marked
    return flipped
