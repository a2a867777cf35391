"""Which elements of a sharded (FSDP2) parameter this rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeGuard, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from delta_weight_sync.codec import Index


@dataclass(frozen=True)
class Block:
    """A box of a parameter: the parameter's shape, where the box begins, and its own shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """The whole parameter."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def at(self) -> tuple[slice, ...]:
        """The box as an index into the parameter."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))

    def stretches(self) -> tuple[Index, int]:
        """Where the box's stretches of memory begin in the parameter, int64 [n], and their length."""
        rest = range(1, len(self.shape) + 1)
        outer = next((d for d in rest if self.extent[d:] == self.shape[d:]), 1) - 1
        length = math.prod(self.extent[outer:])
        return self.positions(np.arange(0, math.prod(self.extent), max(1, length))), length

    def positions(self, index: Index) -> Index:
        """Convert row-major positions in the box to row-major positions in the parameter."""
        if self.extent == self.shape:
            return index
        if self.extent[1:] == self.shape[1:]:  # whole rows, as FSDP2 shards by default
            return index + self.offset[0] * math.prod(self.shape[1:])
        inside = np.unravel_index(index, self.extent)
        where = tuple(i + o for i, o in zip(inside, self.offset, strict=True))
        return np.ravel_multi_index(where, self.shape).astype(np.int64)


class Part(NamedTuple):
    """What this rank compares of a parameter.

    Attributes:
        tensor: The elements of the block, in the block's shape.
        lasting: `tensor` is the parameter's own memory, not a copy made for this sync.
    """

    name: str
    tensor: torch.Tensor
    block: Block
    lasting: bool


def own_block(tensor: torch.Tensor, *, main: bool) -> Block | None:
    """The block of a parameter that this rank diffs; None if another rank diffs it.

    The main rank diffs tensors that every rank holds in full. If a mesh dimension holds copies of a block,
    its first rank diffs it.
    """
    if not is_block(tensor):
        return Block.whole(tensor.shape) if main else None
    here = tensor.device_mesh.get_coordinate() or ()
    is_copy = any(p.is_replicate() and at for p, at in zip(tensor.placements, here, strict=False))
    block = held_block(tensor)
    return None if is_copy or not math.prod(block.extent) else block


def held_block(tensor: torch.Tensor) -> Block:
    """The block of a parameter on this rank, for a tensor that is whole or `is_block`."""
    if not isinstance(tensor, DTensor):
        return Block.whole(tensor.shape)
    place = tensor.device_mesh, tensor.placements
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, *place)
    return Block(tuple(tensor.shape), offset, extent)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter on this rank, without a gradient."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_block(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a plain block, not a strided or partial one; all ranks agree."""
    return isinstance(tensor, DTensor) and all(type(p) in (Shard, Replicate) for p in tensor.placements)
