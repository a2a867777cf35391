"""Checkpoints as bits: exactly what torch casts. The digest counts every bit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from delta_weight_sync import digest
from delta_weight_sync.checkpoint import (
    INDEX,
    Spec,
    map_bits,
    read_bits,
    specs_in,
    to_bits,
    to_tensor,
    write_bits,
)
from delta_weight_sync.errors import CheckpointError

EVERY_16 = np.arange(1 << 16, dtype=np.uint16)
UPPER = np.arange(1 << 16, dtype=np.uint32) << 16


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_is_rounded_as_torch_rounds_it_and_every_nan_is_one(low):
    values = torch.from_numpy((UPPER | np.uint32(low)).view(np.float32))
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    expected[values.isnan().numpy()] = 0x7FC0
    np.testing.assert_array_equal(to_bits(values), expected)


# One tensor of every dtype that a version can hold, with its words: 16 bits each, or one byte.
EVERY_DTYPE = {
    "BF16": (torch.from_numpy(EVERY_16.copy()).view(torch.bfloat16).view(256, 256), (256, 256)),
    "F16": (torch.randn(3, 5).half(), (3, 5)),
    "F32": (torch.randn(2, 3, 4), (2, 3, 4, 2)),
    "F64": (torch.randn(7).double(), (7, 4)),
    "I64": (torch.tensor([-1, 2**40, 383]), (3, 4)),
    "I32": (torch.tensor(16_777_217, dtype=torch.int32), (2,)),
    "I16": (torch.tensor([[-3, 700]], dtype=torch.int16), (1, 2)),
    "I8": (torch.tensor([-128, 127, 5], dtype=torch.int8), (3,)),
    "U8": (torch.arange(251, dtype=torch.uint8), (251,)),
    "BOOL": (torch.tensor([True, False, True]), (3,)),
    "one": (torch.tensor(1.5).bfloat16(), ()),
    "none": (torch.zeros(0, 4).bfloat16(), (0, 4)),
}


def test_a_checkpoint_of_every_dtype_is_read_and_written_bit_for_bit(tmp_path):
    weights = {name: tensor for name, (tensor, _) in EVERY_DTYPE.items()}
    dtypes = {name: name for name in weights if name.isupper()}
    shapes = {name: words for name, (_, words) in EVERY_DTYPE.items()}
    save_file(weights, tmp_path / "model.safetensors")
    specs = specs_in(tmp_path / "model.safetensors")
    read = dict(read_bits(tmp_path))
    assert specs == {n: Spec(dtypes.get(n, "BF16"), tuple(t.shape)) for n, t in weights.items()}
    assert {name: bits.shape for name, bits in read.items()} == shapes
    write_bits(shapes, read.__getitem__, tmp_path / "again.safetensors", dtypes)
    again = load_file(tmp_path / "again.safetensors")
    mapped = map_bits(tmp_path / "again.safetensors")
    for name, tensor in weights.items():
        assert again[name].dtype == tensor.dtype
        for copy in again[name], to_tensor(read[name], specs[name].dtype):
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (copy, tensor)))
        np.testing.assert_array_equal(mapped[name], read[name])


def test_what_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        next(read_bits(tmp_path))
    save_file({"w": torch.ones(8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="w is F8_E4M3, as in a quantized checkpoint: dequantize it first"
    ):
        next(read_bits(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        next(read_bits(tmp_path))


def test_an_index_cannot_name_a_file_outside_of_its_folder(tmp_path):
    save_file({"w": torch.ones(8)}, tmp_path / "outside.safetensors")
    (tmp_path / "base").mkdir()
    index = json.dumps({"weight_map": {"w": "../outside.safetensors"}})
    (tmp_path / "base" / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"names \.\./outside\.safetensors, which base lacks"):
        next(read_bits(tmp_path / "base"))


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


def test_a_dtype_that_no_version_has_is_refused_by_name(tmp_path):
    save_file({"w_scale": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has w_scale in F8_E4M3"):
        map_bits(tmp_path / "model.safetensors")
