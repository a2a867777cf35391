"""The state digest: equal exactly when all bits are equal, and cheap to carry along."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync import digest


@given(seed=st.integers(0, 2**32), changes=st.integers(0, 50))
def test_a_change_moves_the_digest_as_a_full_hash_would(seed, changes):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 65536, 500).astype(np.uint16)
    index = np.sort(rng.choice(500, changes, replace=False))
    new = old.copy()
    new[index] = rng.integers(0, 65536, changes)
    moved = digest.tensor_digest("w", old) + digest.change_digest("w", index, old[index], new[index])
    assert moved % 2**64 == digest.tensor_digest("w", new)


def test_every_single_bit_name_and_place_counts():
    bits = np.arange(64, dtype=np.uint16)
    seen = {digest.tensor_digest("w", bits), digest.tensor_digest("v", bits)}
    for place in range(64):
        for bit in range(16):
            other = bits.copy()
            other[place] ^= np.uint16(1 << bit)
            seen.add(digest.tensor_digest("w", other))
    assert len(seen) == 2 + 64 * 16
    assert digest.tensor_digest("w", bits[::-1]) not in seen


def test_order_and_layout_do_not_count():
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert digest.state_digest({"a": bits, "b": bits}) == digest.state_digest({"b": bits, "a": bits})
    assert digest.tensor_digest("a", bits) == digest.tensor_digest("a", bits.reshape(-1))


@pytest.mark.parametrize("numel", [0, 1, 1000, 10_000])
def test_devices_compute_the_same_digest_as_the_host(numel):
    bits = torch.randint(-32768, 32768, (numel,), dtype=torch.int16)
    on_host = digest.tensor_digest("w", bits.numpy().view(np.uint16))
    assert digest.device_digest("w", bits) == on_host
    assert digest.live_digest("w", bits) == on_host


def test_the_digest_is_what_the_wire_format_says():
    """Pinned: a reader in another language must get this number."""
    bits = np.arange(5000, dtype=np.uint16) * 13
    mask, total = 2**64 - 1, 0

    def mix(number):
        z = (number * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    start = int.from_bytes(hashlib.sha256(b"w").digest()[:8], "little")
    for i, value in enumerate(bits.tolist()):
        inner = (mix(i % 4096) % 2**32) | 1
        total += (mix(start + i // 4096) | 1) * inner * value
    assert digest.tensor_digest("w", bits) == total & mask
