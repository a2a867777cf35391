"""The changed words of one tensor, and the exact arithmetic on them.

A word is 16 bits of a tensor (see `checkpoint`); of a bf16 tensor, it is an element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
from numba import carray
from numpy.typing import NDArray

from delta_weight_sync.codec._lanes import LANES, differs, lowest
from delta_weight_sync.errors import CodecError
from delta_weight_sync.kernels import kernel, pointer
from delta_weight_sync.util import in_order

Bits = NDArray[np.uint16]
Index = NDArray[np.int64]
Table = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)
INFINITY = 0x7F80  # the exponent of infinities and NaNs
NAN = 0x7FC0  # what every NaN of another dtype is cast to
_LINE = 1 << 11  # values compared at a time; their bf16 bits fit into the fastest cache
_CHUNK = 1 << 18  # one call of `_compare` compares about this many values, at most twice as many
_BATCHES = 16  # calls of `_compare` in one job of a thread
ULP_CLASSES = ("1", "2", "3-4", "5-16", "17-256", "257+")  # sizes of changes in ULPs, in either direction
_CLASS_STARTS = np.array([2, 3, 5, 17, 257])  # smallest size in each class but the first


@dataclass(slots=True, weakref_slot=True)
class Patch:
    """The changed words of one tensor; an element of a 16-bit dtype is one word.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: The shape of the tensor's words.
        index: int64 [n], strictly increasing row-major positions.
        ulps: uint16 [n], `(new - old) mod 2^16` of the words, never zero. Of bf16, read as signed, +1 is the
            next larger magnitude.
    """

    name: str
    shape: tuple[int, ...]
    index: Index
    ulps: Bits

    @property
    def numel(self) -> int:
        """Number of words of the tensor."""
        return math.prod(self.shape)


def count_ulps(patch: Patch) -> NDArray[np.int64]:
    """Count the changes of a patch in each of `ULP_CLASSES`. A change of the sign has about 2^15 ULPs."""
    distance = np.abs(patch.ulps.view(np.int16).astype(np.int32))
    return np.bincount(np.searchsorted(_CLASS_STARTS, distance, side="right"), minlength=len(ULP_CLASSES))


def diff(name: str, old: Bits, new: Bits) -> Patch:
    """Find the exact difference of two versions of a tensor. Bit patterns are compared, so -0.0 is not 0.0.

    Args:
        name: The tensor's name in the checkpoint.
        old: uint16, any shape: the bf16 patterns before.
        new: uint16, the same shape: the patterns after.

    Raises:
        CodecError: The shapes differ.
    """
    if old.shape != new.shape:
        raise CodecError(f"{name}: shape changed from {old.shape} to {new.shape} within a run")
    return Patch(name, new.shape, *diff_flat(old.reshape(-1), new.reshape(-1)))


def diff_flat(old: Bits, new: Bits, first: int = 0) -> tuple[Index, Bits]:
    """Compare two flat uint16 arrays, whose first element has position `first`. Return (index, ulps)."""
    old = np.ascontiguousarray(old, np.uint16)
    new = np.ascontiguousarray(new, np.uint16)
    _, index, ulps = compare(np.array([[old.ctypes.data, new.ctypes.data, 2, old.size]]), 1)
    return index + first, ulps


def compare(tensors: Table, threads: int = 0) -> tuple[Table, Index, Bits]:
    """Find the differences of many tensors, without a Python step for each tensor.

    Args:
        tensors: int64 [n, 4]. A row has the address of a tensor's old bits, the address of its new values,
            the bytes of a new value (2: bf16; 4: float32, rounded as by `nearest`), and the number of values.
            Old bits and new values are contiguous.
        threads: Number of threads; 0 for `util.THREADS`.

    Returns:
        Counts, int64 [2, n]: each tensor's changes, and its changes to NaN or infinity. Then `index` and
        `ulps` of all changes, as in a `Patch`, one tensor after the other.
    """
    number = np.arange(len(tensors))
    pieces = cut(np.stack([number, 0 * number, tensors[:, 3]], 1), _CHUNK)
    batches = np.split(pieces, np.flatnonzero(np.diff(pieces[:, 2].cumsum() // _CHUNK)) + 1)
    jobs = (batches[first : first + _BATCHES] for first in range(0, len(batches), _BATCHES))

    def work(some: list[Table]) -> list[tuple[Table, Index, Bits]]:
        index = np.empty(2 * _CHUNK, np.int64)
        ulps = np.empty(2 * _CHUNK, np.uint16)
        found = []
        for batch in some:
            counts = np.zeros((2, len(batch)), np.int64)
            size = _compare(tensors, batch, index, ulps, counts)
            found.append((counts, index[:size].copy(), ulps[:size].copy()))
        return found

    found = [*chain.from_iterable(in_order(work, jobs, threads))]
    counts, places, amounts = zip(*found, strict=True)
    of_tensors = np.stack([np.bincount(pieces[:, 0], row, len(tensors)) for row in np.concatenate(counts, 1)])
    return of_tensors.astype(np.int64), join(places, np.int64), join(amounts, np.uint16)


def cut(parts: Table, size: int) -> Table:
    """Cut each part (row of int64 [p, 3]: tensor, start, length) into pieces of at most `size`."""
    counts = -(-parts[:, 2] // size)
    pieces = np.repeat(parts, counts, axis=0)
    offset = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    pieces[:, 1] += offset
    pieces[:, 2] = np.minimum(size, pieces[:, 2] - offset)
    return pieces


def join(parts: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    """Join the parts to one array. Without parts, return an empty array of `dtype`."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])


def apply(patch: Patch, bits: Bits) -> None:
    """Add the patch to `bits` (uint16, C-contiguous) in place. Raises `CodecError` if the two do not fit."""
    if bits.shape != patch.shape:
        raise CodecError(f"{patch.name}: the delta is for shape {patch.shape}, the model has {bits.shape}")
    if patch.index.size and not 0 <= patch.index[0] <= patch.index[-1] < bits.size:
        raise CodecError(f"{patch.name}: a position lies outside shape {patch.shape}")
    if bits.dtype == np.uint8:  # a mapped tensor whose elements have one byte
        bits.reshape(-1)[patch.index] += patch.ulps.astype(np.uint8)
    else:
        _add(bits.reshape(-1), patch.index, patch.ulps)


def inverse(patch: Patch) -> Patch:
    """The patch that undoes `patch`."""
    return Patch(patch.name, patch.shape, patch.index, (0 - patch.ulps).astype(np.uint16))


def merge(first: Sequence[Patch], second: Sequence[Patch]) -> list[Patch]:
    """Merge patches `first` and later patches `second`: one patch per tensor, without changes that cancel."""
    merged = {p.name: p for p in first}
    for later in second:
        name = later.name
        shape = later.shape
        earlier = merged.setdefault(name, later)
        if earlier.shape != shape:
            raise CodecError(f"{name}: shape changed from {earlier.shape} to {shape} within a run")
        if earlier is not later:
            index = np.empty(earlier.index.size + later.index.size, np.int64)
            ulps = np.empty(index.size, np.uint16)
            count = _merge(earlier.index, earlier.ulps, later.index, later.ulps, index, ulps)
            for array in (index, ulps):
                array.resize(count, refcheck=False)  # in place: a copy of a large tensor's changes is large
            merged[name] = Patch(name, shape, index, ulps)
    return [p for p in merged.values() if p.index.size]


@kernel
def nearest(words: NDArray[np.uint32], bits: Bits) -> None:
    """Round float32 `words` [n] to the nearest bf16 `bits`, ties to even. Every NaN becomes 0x7fc0."""
    for j in range(words.size):
        word = words[j]
        rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits[j] = np.uint16(NAN) if is_nan else np.uint16(rounded)


@kernel
def _compare(tensors: Table, pieces: Table, index: Index, ulps: Bits, counts: Table) -> int:
    """Compare `pieces` (int64 [p, 3]: tensor, first value, number of values); return how many differ."""
    count = 0
    line = np.empty(_LINE, np.uint16)
    for p in range(pieces.shape[0]):
        tensor, first, size = pieces[p]
        before, now, width, _ = tensors[tensor]
        for at in range(first, first + size, _LINE):
            length = min(_LINE, first + size - at)
            begin = count
            old = carray(pointer(before + 2 * at), length)
            new = line[:length]
            if width == 4:
                nearest(carray(pointer(now + 4 * at), 2 * length).view(np.uint32), new)
            else:
                new = carray(pointer(now + 2 * at), length)
            count += _scan(old, new, at, index[count:], ulps[count:])
            for j in range(begin, count):
                bits = new[index[j] - at]
                counts[1, p] += (bits & np.uint16(INFINITY)) == INFINITY
            counts[0, p] += count - begin
    return count


@kernel
def _scan(old: Bits, new: Bits, first: int, index: Index, ulps: Bits) -> int:
    count = 0
    whole = old.size // LANES * LANES
    # Bit j of `word` says whether element start + j changed. The last word may stand for fewer elements.
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
    i = 0
    j = 0
    count = 0
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
        count += change != 0  # a change that cancels is overwritten by the next
    return count
