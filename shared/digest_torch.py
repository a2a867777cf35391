"""The state digest of tensors where they live: numba on the host, integer tensor operations on a device."""

from __future__ import annotations

import numpy as np
import torch

from shared import digest

_CHUNK = 1 << 24  # elements per step; bounds the int64 temporaries to half a gigabyte


def tensor_digest(name: str, bits: torch.Tensor) -> int:
    """As `digest.tensor_digest`, for an int16 tensor of bf16 patterns, contiguous, on any device."""
    if bits.device.type == "cpu":
        return digest.tensor_digest(name, bits.numpy().view(np.uint16))
    return device_digest(name, bits)


def device_digest(name: str, bits: torch.Tensor) -> int:
    """The same sum with int64 tensor operations, which wrap as uint64 ones do; runs on every device."""
    flat, total = bits.reshape(-1), 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64) & 0xFFFF
        place = torch.arange(start, start + part.numel(), device=bits.device, dtype=torch.int64)
        total += int((_mix(place + _signed(int(digest.seed(name)))) * part).sum().item())
    return total % (1 << 64)


def _mix(i: torch.Tensor) -> torch.Tensor:
    z = i * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift: torch's is arithmetic, so the copied sign bits are masked off."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
