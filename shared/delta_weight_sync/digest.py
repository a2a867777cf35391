"""The digest: one 64-bit hash of all weight bits, which a delta updates in O(changes).

    digest = sum over tensors t, elements i of  r(t, i) * bits(t, i)             mod 2^64
    r(t, i) = (mix(seed(t) + i // 4096) | 1) * (mix(i mod 4096) mod 2^32 | 1)

`bits` is a word of the tensor as an unsigned integer (for bf16, an element), `i` the word's row-major
position, `mix(i)` the i-th output of splitmix64 with seed 0 (Steele, Lea & Flood, 2014), `seed(t)` the first
eight bytes of sha256(name). The sum does not depend on order, so replicas can hash shards in any layout.
Changing an element from `a` to `b` adds `r * (b - a)`. In a block of 4096 elements, the first factor of `r`
is constant, and the second has 32 bits. So the sum of second factor * `bits` over a block is below 2^60, and
vector instructions can compute this sum. The digest detects any one wrong element, but several may cancel out
by chance. The digest guards against mistakes, sha256 against tampering.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits, Index
from delta_weight_sync.kernels import kernel, pointer
from delta_weight_sync.util import in_order

BLOCK = 4096
_NO_BLOCK = np.uint64(1 << 63)  # no block has this number


@kernel
def _mix(i: Any) -> Any:
    """Mix the bits of a uint64, or of each uint64 in an array."""
    z = i * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def outer(seed: np.uint64, block: np.uint64) -> np.uint64:
    """The factor of block number `block` of a tensor."""
    return np.uint64(_mix(seed + block) | np.uint64(1))


# uint32 [4096]: the factor of a position within its block
INNER: NDArray[np.uint32] = _mix(np.arange(BLOCK, dtype=np.uint64)).astype(np.uint32) | np.uint32(1)


@kernel
def _hash_block(bits: Bits, factors: NDArray[np.uint32]) -> np.uint64:
    """Hash a part of one block. Takes slices, because numba vectorises only a loop that begins at index 0."""
    total = np.uint64(0)
    for j in range(bits.size):
        total += np.uint64(factors[j]) * np.uint64(bits[j])
    return total


@kernel
def hash_dense(bits: Bits, first: int, inner: NDArray[np.uint32], seed: np.uint64) -> np.uint64:
    """Digest of flat bits that begin at position `first` of their tensor."""
    total = np.uint64(0)
    at = 0
    while at < bits.size:
        offset = (first + at) % BLOCK
        length = min(BLOCK - offset, bits.size - at)
        block = _hash_block(bits[at : at + length], inner[offset : offset + length])
        total += outer(seed, np.uint64((first + at) // BLOCK)) * block
        at += length
    return total


@kernel
def add_at(
    bits: Bits, at: Index, ulps: Bits, index: Index, first: int, inner: NDArray[np.uint32], seed: np.uint64
) -> np.uint64:
    """Add `ulps[j]` to `bits[at[j]]`, the tensor's element `first + index[j]`. Return the digest's change."""
    total = np.uint64(0)
    block = _NO_BLOCK
    factor = np.uint64(0)
    for j in range(index.size):
        i = np.uint64(first + index[j])
        if i // np.uint64(BLOCK) != block:  # neighbouring positions mostly share a block
            block = i // np.uint64(BLOCK)
            factor = outer(seed, block)
        old = bits[at[j]]
        bits[at[j]] = new = np.uint16(old + ulps[j])
        total += factor * np.uint64(inner[i % np.uint64(BLOCK)]) * (np.uint64(new) - np.uint64(old))
    return total


@kernel
def _add_all(tensors: NDArray[np.uint64], index: Index, ulps: Bits, inner: NDArray[np.uint32]) -> np.uint64:
    """Change several tensors. `tensors`, uint64 [n, 3], has address, seed and number of changes of each."""
    total = np.uint64(0)
    first = 0
    for t in range(tensors.shape[0]):
        places = index[first : first + np.int64(tensors[t, 2])]
        amounts = ulps[first : first + places.size]
        bits = carray(pointer(np.int64(tensors[t, 0])), places[-1] + 1)
        total += add_at(bits, places, amounts, places, 0, inner, tensors[t, 1])
        first += places.size
    return total


@functools.lru_cache(1 << 16)
def seed(name: str) -> np.uint64:
    """A tensor's seed, 8 bytes of sha256(name), little-endian. `seed + block` selects a block's factor."""
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def tensor_digest(name: str, bits: Bits, first: int = 0) -> int:
    """Digest of a tensor's row-major bf16 bits (uint16, any shape), or of a part that begins at `first`."""
    return int(hash_dense(np.ascontiguousarray(bits, np.uint16).reshape(-1), first, INNER, seed(name)))


def change_digest(name: str, index: Index, old: Bits, new: Bits) -> int:
    """How the digest changes (mod 2^64) when `old` becomes `new` (uint16 [n]) at flat positions `index`."""
    return int(add_at(old.copy(), np.arange(index.size), new - old, index, 0, INNER, seed(name)))


def add_all(tensors: Iterable[tuple[str, int, int]], index: Index, ulps: Bits) -> int:
    """Change tensors in memory. Returns how the digest changes (mod 2^64).

    `tensors` has for each tensor: name, address of its contiguous bits, and number of changes (at least one).
    `index` and `ulps` [n] are as in a `Patch`, one tensor after the other.
    """
    rows = [(address, seed(name), changes) for name, address, changes in tensors]
    return int(_add_all(np.array(rows, np.uint64).reshape(-1, 3), index, ulps, INNER))


def state_digest(state: Mapping[str, Bits]) -> int:
    """Digest of a whole model: checkpoint name -> bf16 bits (uint16)."""
    return sum(in_order(lambda item: tensor_digest(*item), state.items())) % (1 << 64)


def to_hex(digest: int) -> str:
    """Format a digest as manifests and status pages show it: 16 hex digits."""
    return f"{digest % (1 << 64):016x}"
