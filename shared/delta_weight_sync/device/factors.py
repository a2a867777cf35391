"""The factors of the state digest (`delta_weight_sync.digest`) for kernels, in 64-bit integers that wrap.

r(t, i) = outer(seed(t), i // 4096) * INNER[i mod 4096]
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from delta_weight_sync.digest import INNER


@triton.jit
def outer(seed: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Factor of a block of 4096 elements: uint64 of any shape from uint64 `seed` and integer `block`."""
    z = (seed + block.to(tl.uint64)) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@functools.cache
def inner(device: torch.device) -> torch.Tensor:
    """The factors of positions within a block, on a device: int32 [4096], to be read as uint32."""
    return torch.from_numpy(INNER.view(np.int32).copy()).to(device)


def signed(value: int) -> int:
    """The int64 with the bits of a number below 2^64: torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value
