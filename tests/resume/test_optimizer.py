"""A float32 master is made again from its published bf16 bits and what is kept beside them, bit for bit."""

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import to_bits, to_nearest
from delta_weight_sync.resume import optimizer

SPECIAL = (0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0xBF81)  # zeros, denormals, numbers
HUGE = (0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF)  # what rounds up to infinity, infinities, NaN


def again(words: np.ndarray) -> np.ndarray:
    """What comes back of float32 bits; the published ones are torch's cast, as in a mirror."""
    numbers = words.view(np.float32)
    rest = optimizer.split(numbers)
    published = to_bits(torch.from_numpy(numbers.copy()))
    return optimizer.masters(published, rest).view(np.uint32)


@pytest.mark.parametrize("high", SPECIAL + HUGE, ids=hex)
def test_every_low_half_comes_back(high):
    words = (np.uint32(high) << np.uint32(16)) | np.arange(1 << 16, dtype=np.uint32)
    np.testing.assert_array_equal(again(words), words)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_every_high_half_comes_back(low):
    words = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)
    np.testing.assert_array_equal(again(words), words)


def test_few_numbers_are_kept_whole():
    """Of numbers only those that rounded up from the very middle: one in 131,072 of random ones."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    words = words[~np.isnan(words.view(np.float32))]
    odd = optimizer.split(words.view(np.float32)).odd
    assert (words[odd] & 0x1FFFF == 0x18000).all()
    assert odd.size < 30


def test_a_nan_is_kept_whole_whatever_a_machine_casts_it_to():
    nan = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001], np.uint32)
    rest = optimizer.split(nan.view(np.float32))
    for published in (0x7FC0, 0xFFFF, 0x7FFF):
        cast = np.full(3, published, np.uint16)
        np.testing.assert_array_equal(optimizer.masters(cast, rest).view(np.uint32), nan)


def test_what_is_kept_beside_a_bf16_number_is_nothing_odd():
    numbers = torch.randn(1000).bfloat16().float().numpy()
    rest = optimizer.split(numbers)
    assert not rest.low.any()
    assert not rest.odd.size
    np.testing.assert_array_equal(optimizer.masters(to_nearest(numbers), rest), numbers)
