"""Every kernel launch and every wait for the device goes through here, where they can be counted.

A count that grows with the number of tensors is what made a sync slow on a GPU: it must not come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Counts:
    """What a block of code asked of the device."""

    launches: int = 0
    waits: int = 0


_counting: list[Counts] = []


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel of so many programs; of none, nothing."""
    if programs:
        for counts in _counting:
            counts.launches += 1
        kernel[(programs,)](*arguments, **constants)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, once all work that it waits for is done: the only call that blocks.

    Of a GPU's memory through pinned memory, which torch keeps for the next read.
    """
    for counts in _counting:
        counts.waits += 1
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is launched and waited for within, in whatever thread."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)
