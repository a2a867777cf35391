"""The modes in which a group of tensors can be coded, each with its exact size.

    gaps    distances between changes, one band                      needs nothing
    bands   distances within eight bands of like magnitude           needs the old weights
    mask    a bitmask of the changes through zstd: clustered changes needs nothing
    dense   the difference of every element through zstd             needs nothing
    raw     the new bits of every element through zstd               needs the old weights (for the ULPs)

A tensor without changes is not listed: that is the mode "empty".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast

from delta_weight_sync.codec import bands, planes, positions, rice, runs, values
from delta_weight_sync.codec.bands import Band
from delta_weight_sync.codec.lanes import BANDS
from delta_weight_sync.codec.patch import Bits, CodecError, Index, Patch, join
from delta_weight_sync.codec.values import Streams, Values

Mode = Literal["gaps", "bands", "mask", "dense", "raw"]
Old = Callable[[str], Bits]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], FailFast()]  # a hostile list of a million errors is one error


class Layout(NamedTuple):
    """What a group of a mode has: the numbers of its limits, gaps, large and sizes; and what it reads."""

    rows: tuple[int, int, int, int]
    streams: tuple[str, ...]
    reads_old: bool = False


_VALUES = ("signs", "large", "sizes")
LAYOUTS: dict[Mode, Layout] = {
    "gaps": Layout((0, 1, 1, 1), ("gaps", *_VALUES)),
    "bands": Layout((BANDS - 1, BANDS, BANDS, BANDS), ("gaps", *_VALUES), reads_old=True),
    "mask": Layout((0, 0, 1, 1), ("mask", *_VALUES)),
    "dense": Layout((0, 0, 0, 0), ("low", "high")),
    "raw": Layout((0, 0, 0, 0), ("low", "high"), reads_old=True),
}


class Group(BaseModel):
    """How the tensors of one group are coded; what a reader needs beside the streams.

    `gaps` and `large` are rows of `runs.Section`, `sizes` of `values.Large`. As plain tuples, because each
    surplus item of a named tuple would be an error of its own.
    """

    model_config = ConfigDict(frozen=True)
    mode: Mode
    limits: Many[int] = ()
    gaps: Many[tuple[int, int, bool, int]] = ()
    large: Many[tuple[int, int, bool, int]] = ()
    sizes: Many[tuple[int, int]] = ()

    def explain(self) -> str:
        """What the mode means, in words."""
        texts = {
            "gaps": "distances between changes",
            "bands": f"distances within eight bands of magnitude, cut at exponents {list(self.limits)}",
            "mask": "one bit per element, compressed",
            "dense": "the difference of every element, compressed",
            "raw": "the new bits of every element, compressed",
        }
        return f"{self.mode}: {texts[self.mode]}"


class Listed(NamedTuple):
    """One tensor of a group, as the file's table lists it."""

    name: str
    shape: tuple[int, ...]
    changes: int
    group: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def encode_group(mode: Mode, patches: Sequence[Patch], old: Old) -> tuple[Group, Streams]:
    """Code a group of tensors in `mode`; `old` gives the bits of a tensor's base."""
    ulps = join([p.ulps for p in patches], np.uint16)
    if mode == "dense":
        return Group(mode=mode), planes.pack_values(planes.zigzag(_spread(patches)))
    if mode == "raw":
        return Group(mode=mode), planes.pack_values(_new_bits(patches, old))
    if mode == "bands":
        return _encode_bands(patches, ulps, old)
    coded, streams = values.encode(ulps, np.zeros(ulps.size, np.uint8), 1)
    group = {"mode": mode, "large": coded.large, "sizes": coded.sizes}
    if mode == "mask":
        mask = planes.pack_mask([p.index for p in patches], [p.numel for p in patches])
        return Group.model_validate(group), streams | {"mask": mask}
    sections, gaps = runs.encode([flat_runs(patches)], [sum(p.numel for p in patches)])
    return Group.model_validate(group | {"gaps": sections}), streams | {"gaps": gaps}


def decode_group(group: Group, listed: Sequence[Listed], streams: Streams, old: Old) -> Iterator[Patch]:
    """The patches of a group, one tensor at a time."""
    rows = tuple(len(each) for each in (group.limits, group.gaps, group.large, group.sizes))
    if rows != LAYOUTS[group.mode].rows:  # the kernels rely on it
        raise CodecError(f"a group of mode {group.mode} has {rows} bands, not {LAYOUTS[group.mode].rows}")
    if group.mode in ("dense", "raw"):
        yield from _decode_planes(group.mode, listed, streams, old)
        return
    changes = sum(tensor.changes for tensor in listed)
    reader = values.Reader(Values(list(group.large), list(group.sizes)), streams, changes)
    for tensor, (index, band_of) in zip(listed, _positions(group, listed, streams, old), strict=True):
        yield Patch(tensor.name, tensor.shape, index, reader.read(band_of))
    if not reader.finished():
        raise CodecError("the values do not end with the last change")


def _encode_bands(patches: Sequence[Patch], ulps: Bits, old: Old) -> tuple[Group, Streams]:
    olds = [old(p.name).reshape(-1) for p in patches]
    limits = bands.choose_limits(olds, patches)
    cut = bands.cut(limits)
    parts, elements, band_of = positions.band_runs(olds, [p.index for p in patches], cut)
    sections, gaps = runs.encode(parts, elements)
    coded, streams = values.encode(ulps, band_of, BANDS)
    group = Group(
        mode="bands",
        limits=tuple(limits),
        gaps=tuple(sections),
        large=tuple(coded.large),
        sizes=tuple(coded.sizes),
    )
    return group, streams | {"gaps": gaps}


def flat_runs(patches: Sequence[Patch]) -> Index:
    """int64 [n]: the unchanged elements before each change of a group."""
    out = np.empty(sum(p.index.size for p in patches), np.int64)
    carried, first = 0, 0
    for patch in patches:
        carried = positions.flat_runs(patch.index, patch.numel, carried, out[first:])
        first += patch.index.size
    return out


def _positions(
    group: Group, listed: Sequence[Listed], streams: Streams, old: Old
) -> Iterator[tuple[Index, Band]]:
    """(index, band of each change) of one tensor after the other."""
    if group.mode == "mask":
        for tensor, index in zip(
            listed, planes.unpack_mask(streams["mask"], [t.numel for t in listed]), strict=True
        ):
            _require(index.size == tensor.changes, tensor)
            yield index, np.zeros(index.size, np.uint8)
        return
    walk = _Walk(group, streams["gaps"])
    for tensor in listed:
        index, band_of = np.empty(tensor.changes, np.int64), np.zeros(tensor.changes, np.uint8)
        bits = old(tensor.name).reshape(-1) if group.mode == "bands" else None
        _require(walk.next(tensor.numel, bits, index, band_of) == tensor.changes, tensor)
        yield index, band_of
    if not runs.finished(walk.state):
        raise CodecError("there are more changes than the table lists")


class _Walk:
    """Walks through the tensors of a group from change to change."""

    def __init__(self, group: Group, stream: NDArray[np.uint8]) -> None:
        self.words, self.state = rice.to_words(stream), runs.reader(group.gaps, stream.size)
        if any(not 0 <= limit <= 255 for limit in group.limits) or list(group.limits) != sorted(group.limits):
            raise CodecError(f"limits {list(group.limits)} are not ascending exponents")
        self._cut = bands.cut(group.limits)
        if not runs.start(self.words, self.state):
            raise CodecError("the section of positions is damaged")

    def next(self, numel: int, bits: Bits | None, index: Index, band_of: Band) -> int:
        if bits is None:
            return runs.flat_walk(self.words, self.state, numel, index)
        return positions.band_walk(self.words, self.state, bits, *self._cut, index, band_of)


def _decode_planes(mode: Mode, listed: Sequence[Listed], streams: Streams, old: Old) -> Iterator[Patch]:
    content = planes.unpack_values(streams, sum(tensor.numel for tensor in listed))
    content = planes.unzigzag(content) if mode == "dense" else content
    first = 0
    for tensor in listed:
        part = content[first : first + tensor.numel]
        ulps = part if mode == "dense" else part - old(tensor.name).reshape(-1)
        index = np.flatnonzero(ulps)
        _require(index.size == tensor.changes, tensor)
        yield Patch(tensor.name, tensor.shape, index, ulps[index])
        first += tensor.numel


def _require(as_listed: bool, tensor: Listed) -> None:
    if not as_listed:
        raise CodecError(f"{tensor.name}: its changes are not the {tensor.changes} that the table lists")


def _spread(patches: Sequence[Patch]) -> Bits:
    parts = [np.zeros(p.numel, np.uint16) for p in patches]
    for part, patch in zip(parts, patches, strict=True):
        part[patch.index] = patch.ulps
    return np.concatenate(parts)


def _new_bits(patches: Sequence[Patch], old: Old) -> Bits:
    parts = [old(p.name).reshape(-1).copy() for p in patches]
    for part, patch in zip(parts, patches, strict=True):
        part[patch.index] += patch.ulps
    return np.concatenate(parts)
