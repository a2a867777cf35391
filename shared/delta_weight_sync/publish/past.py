"""The bits of earlier hand-overs, without a snapshot of any: what each of them changed can be taken back.

A change is exact in both directions. So a second copy of the model is moved from one hand-over to another by
writing only what lies between them, about one weight in a hundred for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from delta_weight_sync.codec import Patch
from delta_weight_sync.errors import DeltaWeightSyncError

_UPPER_HALVES = {torch.float32: 2, torch.bfloat16: 1}  # every how many 16 bits there are those of a bf16


class NotKeptError(DeltaWeightSyncError, LookupError):
    """A hand-over that is older than what is kept, or that there never was."""


class _Change(NamedTuple):
    name: str
    places: torch.Tensor  # int32, or int64 for a tensor that needs it
    ulps: torch.Tensor  # int16


class Past:
    """What the newest hand-overs changed. One thread has it, the trainer's."""

    def __init__(self, sync: int, keep: int) -> None:
        """`sync`: of the hand-over that it begins with; `keep`: how many after that one can be taken back."""
        self.syncs = [sync]  # those that can be reached, oldest first
        self._steps: list[list[_Change]] = []  # from each of them to the next
        self._keep = keep

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""
        changes = [change for step in self._steps for change in step]
        return sum(change.places.nbytes + change.ulps.nbytes for change in changes)

    def add(self, sync: int, patches: Iterable[Patch]) -> None:
        """The next hand-over, and what it changed."""
        self._steps.append([_kept(patch) for patch in patches])
        self.syncs.append(sync)
        if len(self._steps) > self._keep:
            del self._steps[0], self.syncs[0]

    def roll(self, weights: Mapping[str, torch.Tensor], start: int, end: int) -> int:
        """Move `weights` from the hand-over `start` to `end`, in place; how many elements that has written.

        `weights`: by the names that were handed over, on any device, contiguous; bf16, or float32 that hold
        what bf16 can. Raises `NotKeptError`, before anything is written.
        """
        first, last = self._at(start), self._at(end)
        steps = self._steps[first:last] if first <= last else self._steps[last:first][::-1]
        return sum(_move(weights[c.name], c, back=first > last) for step in steps for c in step)

    def _at(self, sync: int) -> int:
        if sync not in self.syncs:
            raise NotKeptError(
                f"hand-over {sync} is not kept: {self.syncs[0]} to {self.syncs[-1]} are; keep more of them"
            )
        return self.syncs.index(sync)


def rolled_bits(weights: torch.Tensor) -> torch.Tensor:
    """The bf16 bits of weights that `Past.roll` takes, int16 [n], in their place: writing them writes those.

    Raises `ValueError` for another dtype, in which a published weight would not be exact.
    """
    if weights.dtype not in _UPPER_HALVES:
        raise ValueError(f"weights in {weights.dtype} do not hold every bf16: use float32 or bfloat16")
    every = _UPPER_HALVES[weights.dtype]
    return weights.detach().view(-1).view(torch.int16)[every - 1 :: every]


def _kept(patch: Patch) -> _Change:
    small = patch.numel <= np.iinfo(np.int32).max
    places = torch.from_numpy(patch.index.astype(np.int32 if small else np.int64))
    return _Change(patch.name, places, torch.from_numpy(patch.ulps.view(np.int16).copy()))


def _move(weights: torch.Tensor, change: _Change, *, back: bool) -> int:
    bits = rolled_bits(weights)
    places, ulps = (column.to(bits.device) for column in (change.places, change.ulps))
    bits.index_add_(0, places, ulps, alpha=-1 if back else 1)
    return len(places)
