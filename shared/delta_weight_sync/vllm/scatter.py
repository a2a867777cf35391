"""Reading and writing scattered elements of a parameter, in O(changes).

`memory` is a flat int16 view of a live parameter, `index` int64 [n] positions in it, `values` int16 [n] bits,
all on one device. On the host one numba thread does it, so that vLLM's own threads are left alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from delta_weight_sync.kernel import kernel

_PART = 4096  # elements


def moved(memory: torch.Tensor, index: torch.Tensor, ulps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits at `index` as they are and with `ulps` (int16 [n]) added, which wraps: two of int16 [n]."""
    if memory.device.type != "cpu":
        old = memory[index]
        return old, old + ulps
    old, new = (torch.empty(index.numel(), dtype=torch.int16) for _ in range(2))
    _moved(memory.numpy(), index.numpy(), ulps.numpy(), old.numpy(), new.numpy())
    return old, new


def put(memory: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> int | torch.Tensor:
    """Write `values` at `index` and read them back: returns how many elements are not what was written.

    On a device the count is a tensor there, so that nobody waits for each of many writes.
    """
    if memory.device.type == "cpu":
        return int(_put(memory.numpy(), index.numpy(), values.numpy()))
    memory.index_copy_(0, index, values)
    return (memory[index] != values).sum()


def fill(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `put`, for all elements of a strided view of a parameter and int16 `values` of its shape."""
    view.copy_(values)
    return (view != values).sum()


def warm_up(device: torch.device) -> None:
    """Let everything be compiled and loaded now, not within the first commit's pause."""
    memory, index = (
        torch.zeros(1, dtype=torch.int16, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    put(memory, index, moved(memory, index, memory)[1])


@kernel
def _moved(
    memory: NDArray[np.int16],
    index: NDArray[np.int64],
    ulps: NDArray[np.int16],
    old: NDArray[np.int16],
    new: NDArray[np.int16],
) -> None:
    for j in range(index.size):
        old[j] = memory[np.uint64(index[j])]  # unsigned: without a branch for Python's negative indices
        new[j] = old[j] + ulps[j]


@kernel
def _put(memory: NDArray[np.int16], index: NDArray[np.int64], values: NDArray[np.int16]) -> int:
    """In parts, so that what is read back is still near."""
    wrong = 0
    for first in range(0, index.size, _PART):
        last = min(first + _PART, index.size)
        for j in range(first, last):
            memory[np.uint64(index[j])] = values[j]
        for j in range(first, last):
            wrong += memory[np.uint64(index[j])] != values[j]
    return wrong
