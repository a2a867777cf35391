"""The state digest of tensors where they live: numba on the host, integer tensor operations on a device."""

from __future__ import annotations

import functools

import numpy as np
import torch

from delta_weight_sync import digest
from delta_weight_sync.digest import BLOCK

_CHUNK = BLOCK << 12  # elements per step; bounds the int64 temporaries to half a gigabyte


def tensor_digest(name: str, bits: torch.Tensor) -> int:
    """As `digest.tensor_digest`, for an int16 tensor of bf16 patterns, contiguous, on any device."""
    if bits.device.type == "cpu":
        return digest.tensor_digest(name, bits.numpy().view(np.uint16))
    return device_digest(name, bits)


def device_digest(name: str, bits: torch.Tensor) -> int:
    """The same sum with int64 tensor operations, which wrap as uint64 ones do; runs on every device."""
    flat, total = bits.reshape(-1), torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64) & 0xFFFF
        blocks = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        number = torch.arange(len(blocks), device=bits.device) + start // BLOCK
        total += (_outer(name, number) * (blocks * _inner(bits.device)).sum(1)).sum()
    return int(total.item()) % (1 << 64)


@functools.cache
def _inner(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(digest.INNER.astype(np.int64)).to(device)


def _outer(name: str, block: torch.Tensor) -> torch.Tensor:
    return _mix(block + _signed(int(digest.seed(name)))) | 1


def _mix(i: torch.Tensor) -> torch.Tensor:
    z = i * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift: torch's is arithmetic, so the copied sign bits are masked off."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
