"""Checkpoints as bits: exactly what torch casts. The digest counts every bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from delta_weight_sync import digest
from delta_weight_sync.checkpoint import read_bits, shapes_in, to_bits
from delta_weight_sync.errors import CheckpointError

EVERY_16 = np.arange(1 << 16, dtype=np.uint16)
UPPER = np.arange(1 << 16, dtype=np.uint32) << 16


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_is_rounded_as_torch_rounds_it_and_every_nan_is_one(low):
    values = torch.from_numpy((UPPER | np.uint32(low)).view(np.float32))
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    expected[values.isnan().numpy()] = 0x7FC0
    np.testing.assert_array_equal(to_bits(values), expected)


def test_a_checkpoint_of_any_float_is_read_in_its_shapes(tmp_path):
    weights = {
        "f16": torch.randn(3, 5).half(),
        "f32": torch.randn(2, 3, 4),
        "f64": torch.randn(7).double(),
        "bf16": torch.from_numpy(EVERY_16.copy()).view(torch.bfloat16).view(256, 256),
        "one": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
    }
    save_file(weights, tmp_path / "model.safetensors")
    read, shapes = dict(read_bits(tmp_path)), {name: tuple(t.shape) for name, t in weights.items()}
    assert shapes_in(tmp_path / "model.safetensors") == shapes
    assert {name: bits.shape for name, bits in read.items()} == shapes
    for name, tensor in weights.items():
        np.testing.assert_array_equal(read[name], to_bits(tensor))


def test_what_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        next(read_bits(tmp_path))
    save_file({"w": torch.ones(8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w in model\.safetensors cannot be cast"):
        next(read_bits(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(SafetensorError):
        next(read_bits(tmp_path))


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
