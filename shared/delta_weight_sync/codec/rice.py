"""Bit streams of small non-negative numbers: Rice codes for distances, Exp-Golomb codes for magnitudes.

A stream is little-endian 64-bit words, filled from the lowest bit. A Rice section with parameter k holds all
remainders (k bits each), then all quotients in unary (q zeros and a one): Rice & Plaunt (1971). Distances
between independent events are geometric, for which it is within 3 % of the entropy. An Exp-Golomb code with
parameter k of v is, with w = v + 2^k of n bits: n - k - 1 zeros, a one, the low n - 1 bits of w.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec.lanes import length, lowest
from delta_weight_sync.kernel import kernel

MAX_K = 40
MAX_GOLOMB = 14
Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]


@kernel
def rice_k(numbers: Numbers) -> tuple[int, int]:
    """(k, bits): the parameter with the shortest Rice section for `numbers`, and that length."""
    total = np.int64(0)
    for number in numbers:
        total += number
    guess = 0
    while guess < MAX_K and (numbers.size << (guess + 1)) < total:
        guess += 1
    first, last = max(guess - 1, 0), min(guess + 1, MAX_K)
    quotients = _quotients(numbers, first)
    best_k, best_bits = 0, np.int64(-1)
    for k in range(first, last + 1):
        bits = np.int64(numbers.size) * (k + 1) + quotients[k - first]
        if best_bits < 0 or bits < best_bits:
            best_k, best_bits = k, bits
    return best_k, int(best_bits)


@kernel
def _quotients(numbers: Numbers, k: int) -> tuple[int, int, int]:
    """The sums of the quotients with parameters k, k + 1 and k + 2."""
    one, two, three = np.uint64(0), np.uint64(0), np.uint64(0)
    for number in numbers:
        quotient = np.uint64(number) >> np.uint64(k)
        one += quotient
        two += quotient >> np.uint64(1)
        three += quotient >> np.uint64(2)
    return int(one), int(two), int(three)


@kernel
def put_rice(numbers: Numbers, k: int, words: Words, at: int) -> int:
    """Write a Rice section at bit `at` of zeroed `words`; returns the bit after it."""
    _put_remainders(numbers, k, words, at)
    at += k * numbers.size
    place, word = at >> 6, words[at >> 6]
    for number in numbers:
        at += number >> k
        if at >> 6 != place:
            words[place] = word
            place, word = at >> 6, np.uint64(0)
        word |= np.uint64(1) << np.uint64(at & 63)
        at += 1
    words[place] = word
    return at


@kernel
def _put_remainders(numbers: Numbers, k: int, words: Words, at: int) -> None:
    place, filled, word = at >> 6, at & 63, words[at >> 6]
    for number in numbers:
        remainder = np.uint64(number & ((1 << k) - 1))
        word |= remainder << np.uint64(filled)
        filled += k
        if filled >= 64:
            words[place] = word
            place, filled = place + 1, filled - 64
            word = remainder >> np.uint64(k - filled)
    words[place] = word


@kernel
def peek(words: Words, at: int) -> np.uint64:
    """The 64 bits from bit `at`; the word after the one that `at` is in must be readable."""
    number, shift = np.uint64(at) >> np.uint64(6), np.uint64(at) & np.uint64(63)
    after = words[number + np.uint64(1)] << np.uint64(1)
    return words[number] >> shift | after << (np.uint64(63) - shift)


@kernel
def take(words: Words, at: int, bits: int) -> int:
    """`bits` bits (0 to 63) at bit `at`; readable as for `peek`."""
    return int(peek(words, at) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@kernel
def next_one(words: Words, at: int, end: int) -> int:
    """Position of the first set bit at or after `at`; `end` if there is none before `end`."""
    word = peek(words, at)
    while word == 0 and at < end:
        at += 64
        word = peek(words, at)
    return min(at + lowest(word), end)


@kernel
def golomb_k(numbers: Numbers) -> tuple[int, int]:
    """(k, bits): the parameter with the shortest Exp-Golomb section for `numbers`, and that length."""
    best_k, best_bits = 0, np.int64(-1)
    for k in range(MAX_GOLOMB + 1):
        bits = np.int64(0)
        for number in numbers:
            bits += 2 * length(np.uint64(number) + (np.uint64(1) << np.uint64(k)))
        bits -= np.int64(numbers.size) * (k + 1)
        if best_bits >= 0 and bits > best_bits:
            break  # the length has one minimum
        best_k, best_bits = k, bits
    return best_k, int(best_bits)


@kernel
def put_golomb(numbers: Numbers, k: int, words: Words, at: int) -> int:
    """Write an Exp-Golomb section at bit `at` of zeroed `words`; returns the bit after it."""
    for number in numbers:
        shifted = np.uint64(number) + (np.uint64(1) << np.uint64(k))
        rest = length(shifted) - 1
        at += rest - k
        words[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        at = _put(shifted ^ (np.uint64(1) << np.uint64(rest)), rest, words, at + 1)
    return at


@kernel
def take_golomb(words: Words, at: int, end: int, k: int) -> tuple[int, int]:
    """(number, bit after it) of the Exp-Golomb code at bit `at`; (-1, at) if it does not end before `end`."""
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
    """The stream's bytes as words, with two words of zeros after them."""
    words = np.zeros(stream.size // 8 + 3, np.uint64)
    words.view(np.uint8)[: stream.size] = stream
    return words


def to_bytes(words: Words, bits: int) -> NDArray[np.uint8]:
    """The first `bits` bits of `words`, as whole bytes."""
    return words.view(np.uint8)[: (bits + 7) // 8]
