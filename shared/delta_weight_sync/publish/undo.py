"""The undo log restores the exact weights of earlier syncs, for example of an old policy."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from delta_weight_sync import errors
from delta_weight_sync.codec import Patch


class UndoLog:
    """Holds the changes of the newest syncs, and can restore each of these syncs in a copy of the model.

    Moving the copy from one sync to another writes only changed weights, about one in a hundred per sync.
    Only the trainer's thread may use the log.

    Args:
        sync: The sync with which the log begins.
        keep: Number of syncs that can be undone.

    Attributes:
        syncs: The syncs whose weights can be restored, oldest first.
    """

    def __init__(self, sync: int, keep: int) -> None:
        self.syncs = [sync]
        # The changes from each of `syncs` to the next: name, positions (int32 or int64) and ulps (int16).
        self._steps: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = []
        self._keep = keep

    def add(self, sync: int, patches: Iterable[Patch]) -> None:
        """Append the next sync and what it changed."""
        step = []
        for patch in patches:
            small = patch.numel <= np.iinfo(np.int32).max
            positions = torch.from_numpy(patch.index.astype(np.int32 if small else np.int64))
            step.append((patch.name, positions, torch.from_numpy(patch.ulps.view(np.int16).copy())))
        self._steps.append(step)
        self.syncs.append(sync)
        if len(self._steps) > self._keep:
            del self._steps[0], self.syncs[0]

    def roll(self, weights: Mapping[str, torch.Tensor], start: int, end: int) -> int:
        """Move weights from sync `start` to sync `end`, in place.

        Args:
            weights: Contiguous tensors by published name, on any device; bf16, or float32 with bf16 values.
            start: The sync whose weights these are now.
            end: The sync to restore.

        Returns:
            The number of elements written.

        Raises:
            UndoLogError: The log does not hold `start` or `end`. Nothing is written.
        """
        for sync in {start, end}.difference(self.syncs):
            raise errors.UndoLogError(
                f"the undo log holds syncs {self.syncs[0]} to {self.syncs[-1]}, not {sync};"
                " call `keep_undo_log` with a larger number"
            )
        first = self.syncs.index(start)
        last = self.syncs.index(end)
        steps = self._steps[first:last] if first <= last else self._steps[last:first][::-1]
        changes = [change for step in steps for change in step]
        for name, positions, ulps in changes:
            bits = bf16_bits(weights[name])
            sign = -1 if first > last else 1
            bits.index_add_(0, positions.to(bits.device), ulps.to(bits.device), alpha=sign)
        return sum(len(positions) for _, positions, _ in changes)


def bf16_bits(weights: torch.Tensor) -> torch.Tensor:
    """The bf16 bits of a tensor, as an int16 [n] view of its own memory.

    Raises `ValueError` for any dtype but float32 and bfloat16.
    """
    if weights.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{weights.dtype} weights cannot be moved to another sync: use float32 or bfloat16")
    stride = weights.element_size() // 2  # the bf16 bits are the last two bytes of each weight
    return weights.detach().view(-1).view(torch.int16)[stride - 1 :: stride]
