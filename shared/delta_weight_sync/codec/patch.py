"""The changed elements of one tensor, and the exact arithmetic on them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec.lanes import LANES, differs, lowest
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.kernel import kernel

Bits = NDArray[np.uint16]
Index = NDArray[np.int64]
CHUNK = 1 << 18  # elements compared at a time: bounds the scratch space and keeps it in the cache


class CodecError(DeltaWeightSyncError, ValueError):
    """A delta that cannot be what a publisher wrote; nothing of it may be applied."""


@dataclass(frozen=True)
class Patch:
    """The changed elements of one tensor.

    `index`: int64 [n], strictly increasing row-major positions. `ulps`: uint16 [n], `(new - old) mod 2^16`
    of the bf16 patterns, never zero: read as signed, +1 is the next larger magnitude.
    """

    name: str
    shape: tuple[int, ...]
    index: Index
    ulps: Bits

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def diff(name: str, old: Bits, new: Bits) -> Patch:
    """Exact difference of two bit arrays of one shape; -0.0 and every NaN pattern count as themselves."""
    if old.shape != new.shape:
        raise CodecError(f"{name}: shape changed from {old.shape} to {new.shape} within a run")
    index, ulps = diff_flat(np.ascontiguousarray(old).reshape(-1), np.ascontiguousarray(new).reshape(-1))
    return Patch(name, new.shape, index, ulps)


def diff_flat(old: Bits, new: Bits, first: int = 0) -> tuple[Index, Bits]:
    """(index, ulps) of two flat arrays whose first element has position `first`."""
    scratch = _scratch()
    found: list[tuple[Index, Bits]] = []
    for start in range(0, old.size, CHUNK):
        parts = old[start : start + CHUNK], new[start : start + CHUNK]
        count = _scan(*parts, first + start, *scratch)
        found.append((scratch[0][:count].copy(), scratch[1][:count].copy()))
    return join([index for index, _ in found], np.int64), join([ulps for _, ulps in found], np.uint16)


_kept = threading.local()


def _scratch() -> tuple[Index, Bits]:
    """Room for the changes of a chunk, kept for the next one: fresh pages cost more than the comparison."""
    if not hasattr(_kept, "scratch"):
        _kept.scratch = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.uint16)
    scratch: tuple[Index, Bits] = _kept.scratch
    return scratch


Number = TypeVar("Number", bound=np.generic)


def join(parts: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    """The parts in one array; empty for none."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])


def apply(patch: Patch, bits: Bits) -> None:
    """Add the patch to `bits` (C-contiguous, the base's) in place."""
    if bits.shape != patch.shape:
        raise CodecError(f"{patch.name}: the delta is for shape {patch.shape}, the model has {bits.shape}")
    if patch.index.size and not 0 <= patch.index[0] <= patch.index[-1] < bits.size:
        raise CodecError(f"{patch.name}: position {patch.index[-1]} lies outside shape {patch.shape}")
    _add(bits.reshape(-1), patch.index, patch.ulps)


def inverse(patch: Patch) -> Patch:
    """The patch that takes `patch` back."""
    return Patch(patch.name, patch.shape, patch.index, (0 - patch.ulps).astype(np.uint16))


def merge(first: Sequence[Patch], second: Sequence[Patch]) -> list[Patch]:
    """One patch per tensor that does what `first` and then `second` do; changes that cancel are gone."""
    merged = {p.name: p for p in first}
    for patch in second:
        merged[patch.name] = _merge_one(merged[patch.name], patch) if patch.name in merged else patch
    return [p for p in merged.values() if p.index.size]


def _merge_one(first: Patch, second: Patch) -> Patch:
    if first.shape != second.shape:
        raise CodecError(f"{first.name}: shape changed from {first.shape} to {second.shape} within a run")
    index = np.empty(first.index.size + second.index.size, np.int64)
    ulps = np.empty(index.size, np.uint16)
    count = _merge(first.index, first.ulps, second.index, second.ulps, index, ulps)
    return Patch(first.name, first.shape, index[:count].copy(), ulps[:count].copy())


@kernel
def _scan(old: Bits, new: Bits, first: int, index: Index, ulps: Bits) -> int:
    count = 0
    whole = old.size // LANES * LANES
    for start in range(0, old.size, LANES):
        if start < whole:
            word = differs(old, new, start)
        else:
            word = np.uint64(0)
            for lane in range(old.size - whole):
                word |= np.uint64(old[whole + lane] != new[whole + lane]) << np.uint64(lane)
        while word:
            at = start + lowest(word)
            word &= word - np.uint64(1)
            index[count] = first + at
            ulps[count] = new[at] - old[at]
            count += 1
    return count


@kernel
def _add(bits: Bits, index: Index, ulps: Bits) -> None:
    for j in range(index.size):
        bits[index[j]] += ulps[j]


@kernel
def _merge(a: Index, a_ulps: Bits, b: Index, b_ulps: Bits, index: Index, ulps: Bits) -> int:
    i, j, count = 0, 0, 0
    while i < a.size or j < b.size:
        from_a = i < a.size and (j == b.size or a[i] <= b[j])
        from_b = j < b.size and (i == a.size or b[j] <= a[i])
        change = np.uint16(0)
        if from_a:
            index[count] = a[i]
            change = a_ulps[i]
            i += 1
        if from_b:
            index[count] = b[j]
            change = np.uint16(change + b_ulps[j])
            j += 1
        ulps[count] = change
        count += change != 0
    return count
