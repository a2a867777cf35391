"""Strided parts of flat memory as plain data: which elements they have, and whether two share any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Geometry(NamedTuple):
    """A strided part of flat memory, in elements; outer dimensions first."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position behind the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset + last + 1

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The part of flat `memory`, as a view."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


def part_of(tensor: torch.Tensor) -> Geometry:
    """Where a tensor lies in its storage; equal for the same elements, however they were sliced."""
    return Geometry(int(tensor.storage_offset()), *joined(tensor.shape, tensor.stride()))


def joined(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """The same elements in fewer dimensions, outer first by the first strides: [sizes, strides, ...].

    Dimensions of one element are left out; those that run on in all the strides become one.
    """
    dims: list[tuple[int, ...]] = []
    for size, *steps in sorted(zip(sizes, *strides, strict=True), key=lambda dim: -dim[1]):
        if size == 1:
            continue
        if dims and list(dims[-1][1:]) == [size * step for step in steps]:
            size *= dims.pop()[0]
        dims.append((size, *steps))
    return list(zip(*(dims or [(1,) * (1 + len(strides))]), strict=True))


def overlap(one: Geometry, other: Geometry, numel: int) -> bool:
    """Whether two parts of a memory of `numel` elements have an element in common."""
    if one.end <= other.offset or other.end <= one.offset:
        return False
    return bool((times_touched([one, other], numel) > 1).any())


def times_touched(parts: Sequence[Geometry], numel: int) -> torch.Tensor:
    """In how many parts each element is: int32 [numel / n], one for every n elements that no part divides."""
    runs = [part.sizes[-1] if part.strides[-1] == 1 else 1 for part in parts]
    steps = [step for part in parts for step in (part.offset, *part.strides[:-1])]
    unit = math.gcd(numel, *runs, *steps)
    touched = torch.zeros(numel // unit, dtype=torch.int32)
    for offset, sizes, strides in parts:
        coarse_sizes = (*sizes[:-1], sizes[-1] // unit)
        coarse_strides = (*(stride // unit for stride in strides[:-1]), strides[-1])
        Geometry(offset // unit, coarse_sizes, coarse_strides).of(touched).add_(1)
    return touched


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, which all its views share; without memory, too."""
    return int(tensor.untyped_storage()._cdata)
