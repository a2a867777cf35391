"""The mirror of parameters: the diff is exact in every dtype and layout, by loops and as on a GPU."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Patch
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.publish import mirror as module
from delta_weight_sync.publish.blocks import Block, Part
from delta_weight_sync.publish.mirror import Mirror
from tests.gpu.on_host import forced
from tests.support.mirrors import find

ODD = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3.0])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextlib.contextmanager
def threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_weight_sync.util.THREADS", 3)
        patch.setattr("delta_weight_sync.codec._patch._CHUNK", 100)
        patch.setattr("delta_weight_sync.publish.mirror._TAKEN", 50)
        yield


@pytest.fixture(
    autouse=True, params=[contextlib.nullcontext, threads, forced], ids=["loops", "threads", "device"]
)
def _by(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def pairs(dtype: torch.dtype, numel: int = 5003) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new values, of which a third differs, with every special value turned into every other."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(numel, generator=generator)
    new = torch.where(torch.rand(numel, generator=generator) < 0.3, old * 1.01, old)
    old[:64], new[:64] = ODD.repeat_interleave(8), ODD.repeat(8)
    return old.to(dtype), new.to(dtype)


def diff(kept: Mirror, tensor: torch.Tensor, block: Block | None = None) -> Patch:
    """What changed in the mirror's "w", or in a block of it, after which the mirror has it."""
    found = find(kept, [Part("w", tensor, block or Block.whole(tensor.shape), True)])
    kept.keep(found)
    return found.patches[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_diff_leads_from_the_old_bits_to_the_new_ones(dtype):
    old, new = pairs(dtype)
    was = to_bits(old)
    now = to_bits(new)
    kept = Mirror()
    kept.add("w", old)
    patch = diff(kept, new)
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
    kept = Mirror()
    plain = Mirror()
    kept.add("w", layout(values))
    plain.add("w", layout(values).contiguous())
    values += 0.01 * torch.randn(values.shape, generator=generator)
    assert not np.array_equal(kept.bits("w"), to_bits(layout(values)))
    found = diff(kept, layout(values))
    expected = diff(plain, layout(values).contiguous())
    np.testing.assert_array_equal(found.index, expected.index)
    np.testing.assert_array_equal(found.ulps, expected.ulps)
    np.testing.assert_array_equal(kept.bits("w"), to_bits(layout(values)))


BOXES = {
    "rows": Block((70, 90), (3, 0), (60, 90)),
    "columns": Block((70, 90), (0, 7), (70, 30)),
    "rows of each": Block((6, 50, 40), (3, 7, 0), (2, 20, 40)),
    "inside": Block((6, 50, 40), (1, 7, 3), (3, 20, 10)),
    "all": Block((6, 5, 4), (0, 0, 0), (6, 5, 4)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_block_is_compared_and_taken_over_where_it_lies(box):
    """It is several stretches of memory, which begin anywhere in the blocks of the digest. One mirror is
    given the block alone, another takes the patch that this found.
    """
    values = torch.randn(box.shape)
    ours = Mirror()
    theirs = Mirror()
    for kept in (ours, theirs):
        kept.add("w", values)
    before = ours.bits("w").copy()
    values[box.at] *= -1
    patch = diff(ours, values[box.at], box)
    theirs.take([patch])
    np.testing.assert_array_equal(patch.index, np.flatnonzero(before != to_bits(values)))
    for kept in (ours, theirs):
        np.testing.assert_array_equal(kept.bits("w"), to_bits(values))
        assert kept.digest % 2**64 == tensor_digest("w", to_bits(values))


def test_what_was_found_is_in_the_mirror_only_once_it_is_kept():
    """Until then the publisher's thread reads the bits that were handed over before."""
    kept = Mirror()
    new = torch.tensor([1.0, 3.0])
    kept.add("w", torch.tensor([1.0, 2.0]))
    before = kept.bits("w").copy()
    digest = kept.digest
    found = find(kept, [Part("w", new, Block.whole(new.shape), True)])
    np.testing.assert_array_equal(kept.bits("w"), before)
    assert kept.digest == digest
    kept.keep(found)
    np.testing.assert_array_equal(kept.bits("w"), to_bits(new))


@pytest.mark.parametrize(
    ("tensor", "on_host", "on_device"),
    [
        (torch.zeros(8, 8), 0, 0),
        (torch.zeros(8, 8, dtype=torch.bfloat16), 0, 0),
        (torch.zeros(8, 8, dtype=torch.float16), 4 * 64, 0),
        (torch.zeros(8, 8).t(), 4 * 64, 2 * 64),
    ],
)
def test_a_comparison_counts_what_it_copies(tensor, on_host, on_device):
    mirror = Mirror()
    mirror.add("w", tensor)
    alone = on_device if module.on_device(tensor) else on_host
    blocks = Block.whole(tensor.shape), Block((8, 16), (0, 8), (8, 8))  # a wider one's mirror is cut out
    assert [mirror.copied(Part("w", tensor, block, True)) for block in blocks] == [alone, alone + 2 * 64]
