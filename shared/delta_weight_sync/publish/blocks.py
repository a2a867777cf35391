"""Which part of a parameter a rank holds and compares: a box of its elements."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from delta_weight_sync.codec import Index


@dataclass(frozen=True)
class Block:
    """A box of a parameter's elements: the parameter's `shape`, the box's first element, the box's shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    @functools.cache  # thousands of tensors have few shapes
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """The whole parameter."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def at(self) -> tuple[slice, ...]:
        """The slices that select the box in the parameter."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))

    @property
    def whole_rows(self) -> bool:
        """Whether the box is whole rows, and therefore contiguous in the parameter."""
        return self.extent[1:] == self.shape[1:]

    @property
    def origin(self) -> int:
        """The row-major position of the box's first element in the parameter."""
        return sum(o * math.prod(self.shape[dim + 1 :]) for dim, o in enumerate(self.offset))

    def overlap(self, other: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the elements that are in both boxes, as slices of this box and of the other, or None."""
        ends = np.add(self.offset, self.extent), np.add(other.offset, other.extent)
        first = np.maximum(self.offset, other.offset)
        end = np.minimum(*ends)
        if (first >= end).any():
            return None
        here, there = (tuple(map(slice, first - at, end - at)) for at in (self.offset, other.offset))
        return here, there

    def strided(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the box in the parameter. Dimensions that are whole are one with the dimension
        before them."""
        rest = range(1, len(self.shape) + 1)
        outer = next((d for d in rest if self.extent[d:] == self.shape[d:]), 1) - 1
        strides = (math.prod(self.shape[dim + 1 :]) for dim in range(outer))
        return (*self.extent[:outer], math.prod(self.extent[outer:])), (*strides, 1)

    def stretches(self) -> tuple[Index, int]:
        """Return where in the parameter the box's contiguous stretches begin, int64 [n], and their length."""
        length = self.strided()[0][-1]
        return self.positions(np.arange(0, math.prod(self.extent), max(1, length))), length

    def positions(self, index: Index) -> Index:
        """Convert row-major positions in the box to row-major positions in the whole parameter."""
        if self.extent == self.shape:
            return index
        if self.whole_rows:  # as FSDP2 shards by default
            return index + self.origin
        inside = np.unravel_index(index, self.extent)
        where = tuple(i + o for i, o in zip(inside, self.offset, strict=True))
        return np.ravel_multi_index(where, self.shape).astype(np.int64)


class Part(NamedTuple):
    """The part of a parameter that this rank compares."""

    name: str
    tensor: torch.Tensor  # the elements of the block, in the block's shape
    block: Block
    lasting: bool  # `tensor` is the parameter's own memory, not a copy made for this sync
