"""What the workers of one replica must agree on: sums, whole tensors, and whether all of them succeeded.

Staging runs in a thread beside vLLM's own collectives, so it has a process group of its own, on the host.
With one worker nothing is exchanged.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from delta_weight_sync.errors import DeltaWeightSyncError

_PATIENCE = timedelta(seconds=120)


class WorkerError(DeltaWeightSyncError, RuntimeError):
    """Another worker of this replica failed; the message is its."""


class Ranks:
    """The workers of a replica, seen from one of them."""

    def __init__(self, world_size: int) -> None:
        """To be made by all workers at once."""
        self.size = world_size
        self.rank = dist.get_rank() if world_size > 1 else 0
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world_size > 1 else None

    def gather(self, mine: Any) -> list[Any]:
        """What each worker has, by rank; plain data."""
        everyone = [mine] * self.size
        if self._group is not None:
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all workers' parts, int16 on the host; where one has bits, the others have zeros."""
        if self._group is None:
            return part.cpu()
        together = part.cpu().clone()
        dist.all_reduce(together.view(torch.uint8), group=self._group)
        return together

    def agree(self, error: BaseException | None) -> None:
        """Raise `WorkerError` on every worker whose own `error` is None if any worker has one."""
        reasons = self.gather(f"{type(error).__name__}: {error}" if error else None)
        if error is None and any(reasons):
            raise WorkerError(next(f"rank {i}: {reason}" for i, reason in enumerate(reasons) if reason))
