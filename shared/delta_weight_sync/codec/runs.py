"""Which items of a sequence are events: the runs of items between events, as Rice sections.

Up to eight sequences ("bands") are coded side by side, because the reader walks through them at once. If
more than half of a band's items are events, the others are coded instead (`flipped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import rice
from delta_weight_sync.codec.lanes import lowest
from delta_weight_sync.codec.patch import CodecError, Index
from delta_weight_sync.codec.rice import MAX_K, Numbers, Words, next_one, take
from delta_weight_sync.kernel import kernel

FAR = 1 << 62  # a run that no sequence reaches the end of
REMAINDER, QUOTIENT, END, K, LEFT, RUN, FLIPPED = range(7)  # rows of a reader's state
State = NDArray[np.int64]


class Section(NamedTuple):
    """One band in the stream: `events` Rice codes with parameter `k` in `bits` bits."""

    events: int
    k: int
    flipped: bool
    bits: int


def encode(bands: Sequence[Numbers], totals: Sequence[int]) -> tuple[list[Section], NDArray[np.uint8]]:
    """Code bands of runs; `bands[b]` holds the run before each event, `totals[b]` the items of the band."""
    flips = [2 * runs.size > total for runs, total in zip(bands, totals, strict=True)]
    coded = [
        _others(runs, total) if flip else runs for runs, total, flip in zip(bands, totals, flips, strict=True)
    ]
    choices = [rice.rice_k(runs) for runs in coded]
    words = np.zeros(sum(bits for _, bits in choices) // 64 + 2, np.uint64)
    at = 0
    sections = []
    for runs, flip, (k, bits) in zip(coded, flips, choices, strict=True):
        at = rice.put_rice(runs, k, words, at)
        sections.append(Section(runs.size, k, flip, bits))
    return sections, rice.to_bytes(words, at)


def reader(sections: Sequence[tuple[int, int, bool, int]], stream_bytes: int) -> State:
    """State of a reader at the start of the stream: int64 [7, bands]. Sections must fit."""
    state = np.zeros((7, len(sections)), np.int64)
    at = 0
    for band, (events, k, flipped, bits) in enumerate(sections):
        if not (0 <= k <= MAX_K and 0 <= events * (k + 1) <= bits <= 8 * stream_bytes - at):
            raise CodecError(f"a section of {events} events in {bits} bits does not fit its stream")
        state[:, band] = (at, at + events * k, at + bits, k, events, 0, flipped)
        at += bits
    return state


@kernel
def next_run(words: Words, state: State, band: int) -> int:
    """Items before the band's next event; `FAR` if there is none, -1 if the section is damaged."""
    if state[LEFT, band] == 0:
        return FAR
    state[LEFT, band] -= 1
    k = state[K, band]
    one = next_one(words, state[QUOTIENT, band], state[END, band])
    quotient = one - state[QUOTIENT, band]
    if one == state[END, band] or quotient >> (60 - k) != 0:
        return -1
    run = (quotient << k) + take(words, state[REMAINDER, band], k)
    state[QUOTIENT, band] = one + 1
    state[REMAINDER, band] += k
    return run


@kernel
def start(words: Words, state: State) -> bool:
    """Read the first run of each band; False if a section is damaged."""
    good = True
    for band in range(state.shape[1]):
        state[RUN, band] = next_run(words, state, band)
        good = good and state[RUN, band] >= 0
    return good


@kernel
def walk(words: Words, state: State, band: int, numel: int, index: Index) -> int:
    """Which of the next `numel` items of the band are events, into `index`; returns how many, -1 if bad."""
    count, at, k = 0, state[RUN, band], state[K, band]  # as `next_run`, with the state in registers
    left, remainder = state[LEFT, band], state[REMAINDER, band]
    quotient, end = state[QUOTIENT, band], state[END, band]
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
        if word == 0 or one >= end or zeros >> (60 - k) != 0:
            return -1
        word &= word - np.uint64(1)
        at += 1 + (zeros << k) + take(words, remainder, k)
        remainder += k
        quotient = one + 1
    state[RUN, band], state[LEFT, band] = at - numel, left
    state[REMAINDER, band], state[QUOTIENT, band] = remainder, quotient
    return count


@kernel
def flat_walk(words: Words, state: State, numel: int, index: Index) -> int:
    """Which of the next `numel` items of a single band are marked, into `index`; as `walk`."""
    if not state[FLIPPED, 0]:
        return walk(words, state, 0, numel, index)
    count = 0
    for at in range(numel):
        if state[RUN, 0] == 0:
            state[RUN, 0] = next_run(words, state, 0)
            if state[RUN, 0] < 0:
                return -1
        else:
            state[RUN, 0] -= 1
            if count == index.size:
                return -1
            index[count] = at
            count += 1
    return count


def finished(state: State) -> bool:
    """True if every event was read and met."""
    return bool((state[LEFT] == 0).all() and (state[RUN] > FAR >> 1).all())


@kernel
def _others(runs: Numbers, total: int) -> Numbers:
    """The runs before the items that are not events."""
    out = np.empty(total - runs.size, np.int64)
    count, events, passed = 0, 0, 0
    for run in runs:
        for _ in range(run):
            out[count] = events
            count += 1
            events = 0
        events += 1
        passed += run + 1
    for _ in range(total - passed):
        out[count] = events
        count += 1
        events = 0
    return out
