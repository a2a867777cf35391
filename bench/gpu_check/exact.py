"""Compares every kernel with numba's on the host, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu_check.model import Replica
from bench.gpu_check.report import Row, Rows
from bench.model import find, memory_of
from delta_weight_sync.digest import state_digest
from delta_weight_sync.publish.mirror import Block, Mirror, Part
from delta_weight_sync.vllm.memory import Changes
from delta_weight_sync.vllm.worker import Ranks, commit

_EVERY = np.arange(1 << 16, dtype=np.uint16)


def rows(device: torch.device) -> Rows:
    """One row for each check."""
    checks: dict[str, Callable[[torch.device], bool]] = {
        "a replica: every bit pattern, moved by two distances, is hashed, committed and undone": _replica,
        "a trainer: every finite bit pattern as old and as new value, in bf16 and float32": _trainer,
    }
    if device.type == "cuda":
        checks["a replica: a tensor of more than 2^31 elements"] = _huge
    for text, check in checks.items():
        try:
            yield Row(text, right=check(device))
        except Exception as error:  # noqa: BLE001 - any error is a result of this check
            yield Row(text, f"{type(error).__name__}: {error}", right=False)


def _replica(device: torch.device) -> bool:
    return all(_committed(device, np.roll(_EVERY, distance) - _EVERY) for distance in (1, 32768))


def _committed(device: torch.device, ulps: np.ndarray) -> bool:
    """Check all patterns in one commit; `ulps` says how far each moves."""
    bits = torch.from_numpy(_EVERY.view(np.int16).copy()).to(device)
    _, memory = memory_of({"w": bits.view(torch.bfloat16)})
    element = np.flatnonzero(ulps).astype(np.int32)
    counts = np.array([0]), np.array([element.size])
    write, moved = memory.prepare(Changes(*counts, element, ulps[element]))
    before, after = state_digest({"w": _EVERY}), state_digest({"w": _EVERY + ulps})
    right = memory.digest() % (1 << 64) == before and (before + moved) % (1 << 64) == after
    commit([write], Ranks(1))
    right &= bool((_host(bits) == _EVERY + ulps).all()) and memory.digest() % (1 << 64) == after
    write.undo()
    return right and bool((_host(bits) == _EVERY).all())


def _trainer(device: torch.device) -> bool:
    return all(_handed_over(device, dtype) for dtype in (torch.bfloat16, torch.float32))


def _handed_over(device: torch.device, dtype: torch.dtype) -> bool:
    finite = _EVERY[(_EVERY & 0x7F80) != 0x7F80]  # a cast of NaN differs from device to device
    old, new = (torch.from_numpy(bits.view(np.int16).copy()) for bits in (finite, np.roll(finite, 1)))
    tensors = [bits.view(torch.bfloat16).to(device, dtype) for bits in (old, new)]
    mirror = Mirror("device")
    mirror.add("w", tensors[0])
    found = find(mirror, [Part("w", tensors[1], Block.whole(tensors[1].shape), lasting=True)])
    mirror.keep(found)
    (patch,) = found.patches
    right = patch.index.size == np.count_nonzero(finite != np.roll(finite, 1))
    right &= bool((mirror.bits("w") == np.roll(finite, 1)).all())
    return right and mirror.digest % (1 << 64) == state_digest({"w": np.roll(finite, 1)})


def _huge(device: torch.device) -> bool:
    replica = Replica({"w": ((1 << 31) + 5,)}, device)
    write, moved = replica.memory.prepare(replica.changes())
    before = replica.memory.digest()
    commit([write], Ranks(1))
    after = replica.memory.digest()
    right = (before + moved - after) % (1 << 64) == 0
    return right and state_digest({"w": _host(replica.flat)}) == after % (1 << 64)


def _host(bits: torch.Tensor) -> np.ndarray:
    return bits.cpu().numpy().view(np.uint16)
