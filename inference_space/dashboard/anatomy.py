"""What is in one delta: changed elements by layer and kind of tensor, and by how many ULPs they moved.

Names, shapes and counts stand in the file's table. The distances of the modes `gaps`, `mask` and `dense`
decode without any weights; those of `bands` and `raw` need the old ones, which a dashboard does not have.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from delta_weight_sync.codec import Bits, CodecError, Delta, header_size
from delta_weight_sync.units import size_text

FAR = 5  # ULPs: what moved at least as far is counted together
# A delta may come from anyone, and here no model says how large it can be.
MAX_TABLE = 4 << 20  # bytes of a header that is read: some 50,000 tensors
MAX_DECODE = 64 << 20  # bytes of a delta that is decoded for a picture
MAX_NUMBERS = 1 << 23  # changes, or elements where each is stored, that it may unpack to: at 14 bytes each
_ALONE = {"gaps", "mask", "dense"}
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class Tensor:
    """One row of a delta's table."""

    name: str
    shape: tuple[int, ...]
    changes: int
    elements: int
    mode: str


@dataclass(frozen=True)
class Anatomy:
    """A delta, opened."""

    base: int
    version: int
    encoding: str
    tensors: tuple[Tensor, ...]
    ulps: dict[int, int] | None  # signed distance, cut off at `FAR`, -> elements; None: `why` says it
    why: str

    @property
    def changes(self) -> int:
        """Changed elements."""
        return sum(tensor.changes for tensor in self.tensors)


def open_delta(path: Path) -> Anatomy:
    """Read a delta file; raises `CodecError` naming it if it is none, or lists too many tensors."""
    if header_size(path) > MAX_TABLE:
        raise CodecError(
            f"{path.name} lists its tensors in more than {size_text(MAX_TABLE)}: not opened here"
        )
    delta = Delta(path)
    modes = ["original" if delta.original else delta.groups[tensor.group].mode for tensor in delta.tensors]
    tensors = tuple(
        Tensor(tensor.name, tuple(tensor.shape), tensor.changes, tensor.numel, mode)
        for tensor, mode in zip(delta.tensors, modes, strict=True)
    )
    why = _why_not(set(modes), path.stat().st_size, sum(map(_numbers, tensors)))
    encoding = "original" if delta.original else "small" if "bands" in modes else "fast"
    return Anatomy(delta.base, delta.version, encoding, tensors, None if why else _ulps(delta), why)


def _numbers(tensor: Tensor) -> int:
    """That decoding has in memory at once, about."""
    return tensor.changes if tensor.mode == "gaps" else tensor.elements


def _why_not(modes: set[str], size: int, numbers: int) -> str:
    if size > MAX_DECODE or numbers > MAX_NUMBERS:
        return "This delta is too large to be decoded for a picture."
    if modes <= _ALONE:
        return ""
    named = " and ".join(sorted(modes - _ALONE))
    return f"How far they moved is coded against the old weights (mode {named}), which only replicas have."


def _ulps(delta: Delta) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for patch in delta.patches({tensor.name: tensor.shape for tensor in delta.tensors}, _no_weights):
        moved = np.clip(patch.ulps.view(np.int16), -FAR, FAR)
        counts.update(
            dict(zip(*(part.tolist() for part in np.unique(moved, return_counts=True)), strict=True))
        )
    return dict(counts)


def _no_weights(name: str) -> Bits:
    raise AssertionError(f"{name}: modes that stand alone ask for no weights")


class Cell(NamedTuple):
    """The tensors of one kind in one layer that changed."""

    changes: int
    elements: int

    @property
    def share(self) -> float:
        """Of their elements that changed."""
        return self.changes / self.elements


Cells = dict[tuple[str, int | None], Cell]


def cells(tensors: tuple[Tensor, ...]) -> Cells:
    """(kind, layer or None) -> what changed there."""
    found: Cells = {}
    for tensor in tensors:
        place = _place(tensor.name)
        changes, elements = found.get(place, (0, 0))
        found[place] = Cell(changes + tensor.changes, elements + tensor.elements)
    return found


def _place(name: str) -> tuple[str, int | None]:
    name = name.removesuffix(".weight")
    match = _LAYER.fullmatch(name)
    if match is None:
        return name.removeprefix("model."), None
    return re.sub(r"\.\d+\.", ".*.", match[2]), int(match[1])
