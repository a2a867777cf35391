"""Reading, writing and checking scattered elements of a parameter, in O(changes).

`memory` is a flat int16 view of a live parameter, `index` int64 [n] positions in it, `values` int16 [n] bits,
all on one device. On the host one numba thread does it, so that vLLM's own threads are left alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernel import kernel


def take(memory: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The bits at `index`: int16 [n]."""
    if memory.device.type != "cpu":
        return memory[index]
    values = torch.empty(index.numel(), dtype=torch.int16)
    _take(memory.numpy(), index.numpy(), values.numpy())
    return values


def put(memory: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` at `index`."""
    if memory.device.type != "cpu":
        memory.index_copy_(0, index, values)
    else:
        _put(memory.numpy(), index.numpy(), values.numpy())


def wrong(memory: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> int:
    """How many elements at `index` are not `values`."""
    if memory.device.type != "cpu":
        return int((memory[index] != values).sum().item())
    return int(_wrong(memory.numpy(), index.numpy(), values.numpy()))


def warm_up(device: torch.device) -> None:
    """Let everything be compiled and loaded now, not within the first commit's pause."""
    memory, index = (
        torch.zeros(1, dtype=torch.int16, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    put(memory, index, take(memory, index))
    wrong(memory, index, memory)


@kernel
def _take(memory: NDArray[np.int16], index: NDArray[np.int64], values: NDArray[np.int16]) -> None:
    for j in range(index.size):
        values[j] = memory[index[j]]


@kernel
def _put(memory: NDArray[np.int16], index: NDArray[np.int64], values: NDArray[np.int16]) -> None:
    for j in range(index.size):
        memory[index[j]] = values[j]


@kernel
def _wrong(memory: NDArray[np.int16], index: NDArray[np.int64], values: NDArray[np.int16]) -> int:
    count = 0
    for j in range(index.size):
        count += memory[index[j]] != values[j]
    return count
