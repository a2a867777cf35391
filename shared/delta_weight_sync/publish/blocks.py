"""Which elements of a sharded (FSDP2) parameter are on this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeGuard, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from delta_weight_sync.codec import Index


@dataclass(frozen=True)
class Block:
    """A box of a parameter: the parameter's shape, and where the box begins and how far it extends."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a parameter."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def at(self) -> tuple[slice, ...]:
        """The box as an index into the parameter."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))

    def stretches(self) -> tuple[Index, int]:
        """Where in the parameter its stretches of memory begin, int64 [n] in order, and their length."""
        rest = range(1, len(self.shape) + 1)
        outer = next((d for d in rest if self.extent[d:] == self.shape[d:]), 1) - 1
        length = math.prod(self.extent[outer:])
        return self.positions(np.arange(0, math.prod(self.extent), max(1, length))), length

    def positions(self, index: Index) -> Index:
        """Row-major positions in the parameter of row-major positions in the box."""
        if self.extent == self.shape:
            return index
        if self.extent[1:] == self.shape[1:]:  # whole rows, as FSDP2 shards by default
            return index + self.offset[0] * math.prod(self.shape[1:])
        inside = np.unravel_index(index, self.extent)
        where = tuple(i + o for i, o in zip(inside, self.offset, strict=True))
        return np.ravel_multi_index(where, self.shape).astype(np.int64)


def own_block(tensor: torch.Tensor, *, main: bool) -> Block | None:
    """What of a parameter this rank diffs; None if that is up to another rank.

    Tensors that every rank holds whole are the main rank's. Where a mesh dimension holds copies of a block,
    its first rank diffs it.
    """
    if not is_block(tensor):
        return Block.whole(tensor.shape) if main else None
    here = tensor.device_mesh.get_coordinate() or ()
    is_copy = any(p.is_replicate() and at for p, at in zip(tensor.placements, here, strict=False))
    block = held_block(tensor)
    return None if is_copy or not math.prod(block.extent) else block


def held_block(tensor: torch.Tensor) -> Block:
    """The elements of a parameter on this rank, whoever diffs them; for one that `is_block` or is whole."""
    if not isinstance(tensor, DTensor):
        return Block.whole(tensor.shape)
    place = tensor.device_mesh, tensor.placements
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, *place)
    return Block(tuple(tensor.shape), offset, extent)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter on this rank, those of `own_block`."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_block(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Known from the placements, so that all ranks agree; not so for strided and partial ones."""
    return isinstance(tensor, DTensor) and all(type(p) in (Shard, Replicate) for p in tensor.placements)
