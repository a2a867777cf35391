"""The mirror: the diff is exact for every bit pattern, in every dtype and layout, on host and device path."""

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.publish import mirror
from delta_weight_sync.publish.mirror import Mirror, diff_flat
from delta_weight_sync.publish.sharded import Block

ODD = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3.0])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pairs(dtype: torch.dtype, numel: int = 5003) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new values, of which a third differs, with every special value turned into every other."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(numel, generator=generator)
    new = torch.where(torch.rand(numel, generator=generator) < 0.3, old * 1.01, old)
    old[:64], new[:64] = ODD.repeat_interleave(8), ODD.repeat(8)
    return old.to(dtype), new.to(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16, copy=True).view(torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_path_finds_what_the_host_path_finds(dtype, monkeypatch):
    """Its tensor operations are those of a GPU; chunks are small, so that there are several."""
    old, new = pairs(dtype)
    host, device = as_bits(old), as_bits(old)
    expected = diff_flat(host, new)
    monkeypatch.setattr(mirror, "_HOST_CHUNK", 1000)
    monkeypatch.setattr(mirror, "_diff_on_host", mirror._diff_on_device)
    index, ulps = diff_flat(device, new)
    np.testing.assert_array_equal(index, expected[0])
    np.testing.assert_array_equal(ulps, expected[1])
    assert torch.equal(host, device)
    assert torch.equal(host, as_bits(new))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_diff_leads_from_the_old_bits_to_the_new_ones(dtype):
    old, new = pairs(dtype)
    was, now = to_bits(old), to_bits(new)
    kept = Mirror()
    kept.add("w", old)
    patch = kept.diff("w", new)
    np.testing.assert_array_equal(patch.index, np.flatnonzero(was != now))
    np.testing.assert_array_equal(patch.ulps, (now - was)[patch.index])
    np.testing.assert_array_equal(kept.bits("w"), now)
    assert kept.digest % 2**64 == tensor_digest("w", now)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "rows": lambda t: t[1:-1],
    "expanded": lambda t: t[0].expand(9, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_in_memory_is_the_same_parameter(layout):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(30, 14, generator=generator)
    kept, plain = Mirror(), Mirror()
    kept.add("w", layout(values))
    plain.add("w", layout(values).contiguous())
    values += 0.01 * torch.randn(values.shape, generator=generator)
    assert not np.array_equal(kept.bits("w"), to_bits(layout(values)))
    found, expected = kept.diff("w", layout(values)), plain.diff("w", layout(values).contiguous())
    np.testing.assert_array_equal(found.index, expected.index)
    np.testing.assert_array_equal(found.ulps, expected.ulps)
    np.testing.assert_array_equal(kept.bits("w"), to_bits(layout(values)))


BOXES = {
    "rows": Block((6, 5, 4), (2, 0, 0), (3, 5, 4)),
    "columns": Block((6, 5, 4), (0, 0, 1), (6, 5, 2)),
    "both": Block((6, 5, 4), (3, 2, 0), (3, 1, 4)),
    "all": Block((6, 5, 4), (0, 0, 0), (6, 5, 4)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_block_is_compared_and_taken_over_where_it_lies(box):
    """One mirror is given the block alone, another takes the patch that this found."""
    values = torch.randn(box.shape)
    ours, theirs = Mirror(), Mirror()
    for kept in (ours, theirs):
        kept.add("w", values)
    before = ours.bits("w").copy()
    values[box.at] *= -1
    patch = ours.diff("w", values[box.at], box)
    theirs.take(patch)
    np.testing.assert_array_equal(patch.index, np.flatnonzero(before != to_bits(values)))
    for kept in (ours, theirs):
        np.testing.assert_array_equal(kept.bits("w"), to_bits(values))
        assert kept.digest % 2**64 == tensor_digest("w", to_bits(values))
