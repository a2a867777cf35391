"""The state digest: one 64-bit number for all weight bits, updatable from a delta in O(changes).

    digest = sum over tensors t, elements i of  r(seed(t) + i) * bits(t, i)   mod 2^64

`bits` is the bf16 pattern as an unsigned integer, `i` the row-major position, `r` the finalizer of
splitmix64 (Steele, Lea & Flood, 2014) made odd, `seed(t)` the first eight bytes of sha256(name). The sum
does not depend on order, so replicas can hash shards in any layout, and a change of one element from `a`
to `b` moves it by `r * (b - a)`. Any single wrong element is seen for sure, several with probability
1 - 2^-64; it guards against mistakes, sha256 in the manifest guards against tampering.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numba import njit
from numpy.typing import NDArray

Bits = NDArray[np.uint16]


@njit(cache=True, nogil=True)
def _mix(i):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    z = i * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@njit(cache=True, nogil=True)
def _hash_dense(bits, seed):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    total = np.uint64(0)
    for i in range(bits.size):
        total += _mix(seed + np.uint64(i)) * np.uint64(bits[i])
    return total


@njit(cache=True, nogil=True)
def _hash_change(index, old, new, seed):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    total = np.uint64(0)
    for j in range(index.size):
        total += _mix(seed + np.uint64(index[j])) * (np.uint64(new[j]) - np.uint64(old[j]))
    return total


def seed(name: str) -> np.uint64:
    """Start of a tensor's positions in the hash: the first eight bytes of sha256(name), little-endian."""
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def tensor_digest(name: str, bits: Bits) -> int:
    """Digest of one tensor; `bits` is its row-major bf16 pattern, any shape, uint16."""
    return int(_hash_dense(np.ascontiguousarray(bits).reshape(-1), seed(name)))


def change_digest(name: str, index: NDArray[np.int64], old: Bits, new: Bits) -> int:
    """What to add to a digest (mod 2^64) when `old` becomes `new` at the flat positions `index`."""
    return int(_hash_change(index, old, new, seed(name)))


def state_digest(state: Mapping[str, Bits]) -> int:
    """Digest of a whole model: checkpoint name -> bf16 bits."""
    return sum(tensor_digest(name, bits) for name, bits in state.items()) % (1 << 64)


def to_hex(digest: int) -> str:
    """The form that manifests and status pages carry: 16 hex digits."""
    return f"{digest % (1 << 64):016x}"
