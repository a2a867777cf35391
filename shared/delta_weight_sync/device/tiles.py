"""Which part of which tensor each program compares: the table of a model's stretches, and its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from delta_weight_sync import digest

Column = NDArray[np.int64]
KINDS = {torch.bfloat16: tl.int16, torch.float32: tl.float32, torch.float16: tl.float16}
_ALIGNED = 16  # bytes that a thread reads at once
_TILE = digest.BLOCK


@dataclass(frozen=True)
class Stretches:
    """Where a contiguous parameter, or a box of one, lies in the parameter and in memory.

    `starts`: int64 [n], the first position of each stretch of `length` elements in the whole parameter; in
    `tensor`, of a type of `KINDS`, they follow each other. `mirror`: int16, the bits of the whole parameter.
    """

    name: str
    tensor: torch.Tensor
    mirror: torch.Tensor
    starts: Column
    length: int

    def entries(self) -> Column:
        """Rows of the table, int64 [n, 5]: addresses of element 0 in both memories, start, stop, seed."""
        before = self.length * np.arange(len(self.starts)) - self.starts  # where element 0 would lie
        rows = np.empty((len(self.starts), 5), np.int64)
        rows[:, 0] = self.tensor.data_ptr() + before * self.tensor.element_size()
        rows[:, 1] = self.mirror.data_ptr()
        rows[:, 2], rows[:, 3] = self.starts, self.starts + self.length
        rows[:, 4] = digest.seed(self.name).astype(np.int64)
        return rows


class Tiles:
    """The table of all tensors on one device, and what of it the host needs to read the answer.

    `count`: tiles. `blocks`: int64 [count], the tile's block in its tensor. `ends`: int64 [tensors], tiles of
    a tensor and all before it.
    """

    def __init__(self, stretches: Sequence[Stretches], device: torch.device) -> None:
        self.device = device
        rows = [s.entries() for s in stretches]
        table = np.concatenate(rows)
        start, stop = table[:, 2], table[:, 3]
        tiles = np.where(stop > start, -(-stop // _TILE) - start // _TILE, 0)
        first = np.cumsum(tiles) - tiles
        owner = np.repeat(np.arange(len(table), dtype=np.int32), tiles)
        self.count = owner.size
        self.blocks: Column = (start // _TILE - first)[owner] + np.arange(self.count)
        of_tensor = np.repeat(np.arange(len(stretches)), [len(part) for part in rows])
        self.ends: Column = np.cumsum(np.bincount(of_tensor, tiles, len(stretches)).astype(np.int64))
        self.entries = torch.from_numpy(np.column_stack([table, first])).to(device)
        self.owners = torch.from_numpy(owner).to(device)
        dtypes = np.array([list(KINDS).index(s.tensor.dtype) for s in stretches], np.int64)
        self.launches = self._launches(table, owner, dtypes[of_tensor])

    def _launches(
        self, table: Column, owner: NDArray[np.int32], dtypes: Column
    ) -> list[tuple[torch.dtype, bool, torch.Tensor]]:
        """Tiles that one launch compares: their type, whether all are full and aligned, int32 numbers."""
        first = self.blocks * _TILE
        aligned = (table[:, :2] % _ALIGNED == 0).all(1)[owner]
        whole = aligned & (first >= table[owner, 2]) & (first + _TILE <= table[owner, 3])
        classes = dtypes[owner] * 2 + whole
        which = {n: np.flatnonzero(classes == n).astype(np.int32) for n in np.unique(classes).tolist()}
        return [
            (list(KINDS)[number // 2], number % 2 == 1, torch.from_numpy(tiles).to(self.device))
            for number, tiles in which.items()
        ]
