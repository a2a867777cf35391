"""All pieces of a model in one table of numbers, so that one kernel reaches the whole model.

A piece is a strided part of a checkpoint tensor that lies, strided too, somewhere in a parameter of vLLM. Its
elements are numbered 0, 1, 2, ... in row-major order of the part; from a number follow the position in the
checkpoint tensor and the address in memory. A change is kept as such a number (int32: a larger piece becomes
several rows), so that the same four bytes serve to find it, to hash it and to write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits, Index
from delta_weight_sync.digest import seed
from delta_weight_sync.kernel import kernel
from delta_weight_sync.vllm.weight_map import Piece, Route

Row = NDArray[np.int64]
Rows = NDArray[np.int64]
Elements = NDArray[np.int32]

DIMS = 4
MOST = (1 << 31) - (1 << 16)  # elements of a row: numbers, and those of a last padded block, are int32

# The columns. Sizes and strides have DIMS columns each, outer dimension first, filled up in front with ones.
ADDRESS = 0  # of element 0, in bytes
SEED = 1  # of the tensor in the digest, its 64 bits as an int64
COUNTED = 2  # 1 if this worker counts the piece in the digest
FIRST = 3  # position of element 0 in the checkpoint tensor
SIZES = 4
SOURCE = SIZES + DIMS  # strides in the checkpoint tensor, in elements
TARGET = SOURCE + DIMS  # strides in memory, in elements of 2 bytes
COLUMNS = TARGET + DIMS


class Table:
    """`rows`: int64 [pieces, COLUMNS]; `of`: checkpoint name -> numbers of its rows; one device's memory."""

    def __init__(self, routes: Mapping[str, Route], owned: Mapping[str, Sequence[int]]) -> None:
        """`owned`: of each tensor, the numbers of the pieces that this worker counts in the digest."""
        rows: list[Row] = []
        self.of: dict[str, range] = {}
        for name, numbers in owned.items():
            first = len(rows)
            for number, piece in enumerate(routes[name].pieces):
                rows += _rows(name, piece, counted=number in numbers)
            self.of[name] = range(first, len(rows))
        self.rows = np.array(rows, np.int64).reshape(-1, COLUMNS)
        self.memory = [piece.memory for name in owned for piece in routes[name].pieces]
        self.device = self.memory[0].device if self.memory else torch.device("cpu")

    @property
    def elements(self) -> Index:
        """How many elements each row has, int64 [pieces]."""
        counts: Index = self.rows[:, SIZES:SOURCE].prod(1)
        return counts


def _rows(name: str, piece: Piece, *, counted: bool) -> Iterator[Row]:
    """A piece's rows: one, but of a piece with too many dimensions or elements."""
    sizes, source, target = piece.source.sizes, piece.source.strides, piece.target.strides
    for first, part, strides, place in _parts(sizes, source, target):
        row = np.zeros(COLUMNS, np.int64)
        row[ADDRESS] = piece.memory.data_ptr() + 2 * (piece.target.offset + place)
        row[SEED] = seed(name).astype(np.int64)
        row[COUNTED], row[FIRST] = counted, piece.source.offset + first
        for column, values in ((SIZES, part), (SOURCE, strides[0]), (TARGET, strides[1])):
            row[column : column + DIMS] = 1
            row[column + DIMS - len(values) : column + DIMS] = values
        yield row


Ints = tuple[int, ...]


def _parts(sizes: Ints, source: Ints, target: Ints) -> Iterator[tuple[int, Ints, tuple[Ints, Ints], int]]:
    """(position and place of the first element, its sizes and strides) of parts that are small enough."""
    if len(sizes) <= DIMS and np.prod(sizes, dtype=object) <= MOST:
        yield 0, sizes, (source, target), 0
        return
    take = min(sizes[0], MOST) if len(sizes) == 1 else 1
    for start in range(0, sizes[0], take):
        one = (min(take, sizes[0] - start),) if len(sizes) == 1 else sizes[1:]
        strides = (source, target) if len(sizes) == 1 else (source[1:], target[1:])
        for first, part, steps, place in _parts(one, *strides):
            yield start * source[0] + first, part, steps, start * target[0] + place


def find(row: Row, index: Index) -> tuple[Elements, Index | slice]:
    """Which of some changes are in a row's piece.

    `index`: their positions in the checkpoint tensor, int64 [n], increasing. Returns the numbers of the
    elements, int32 [m], and what selects them from the n: a slice, or int64 [m].
    """
    sizes, strides = row[SIZES:SOURCE], row[SOURCE:TARGET]
    end = row[FIRST] + ((sizes - 1) * strides).sum() + 1
    low, high = np.searchsorted(index, (row[FIRST], end))
    if strides[-1] == 1 and (sizes[:-1] == 1).all():
        return _counted_from(row[FIRST], index[low:high]), slice(low, high)
    element, which = np.empty(high - low, np.int32), np.empty(high - low, np.int64)
    count = _find(row, index[low:high], element, which)
    return element[:count], which[:count] + low


@kernel
def _counted_from(first: int, index: Index) -> Elements:
    """In one pass: the positions are many, and of twice the size."""
    element = np.empty(index.size, np.int32)
    for j in range(index.size):
        element[j] = index[j] - first
    return element


@kernel
def _find(row: Row, index: Index, element: Elements, which: Index) -> int:
    count = 0
    for j in range(index.size):
        rest, number, inside = index[j] - row[FIRST], np.int64(0), True
        for dim in range(DIMS):
            size, stride = row[SIZES + dim], row[SOURCE + dim]
            if size > 1:
                steps = rest // stride
                inside = inside and steps < size
                rest -= steps * stride
                number = number * size + steps
        if inside and rest == 0:
            element[count] = number
            which[count] = j
            count += 1
    return count


def part_of(row: Row, tensor: Bits) -> Bits:
    """A row's elements of its checkpoint tensor, in the order of their numbers."""
    sizes, strides = row[SIZES:SOURCE].tolist(), (2 * row[SOURCE:TARGET]).tolist()
    return as_strided(tensor.reshape(-1)[row[FIRST] :], sizes, strides).reshape(-1)


def cut(counts: Index, size: int) -> tuple[Index, Index, Index]:
    """Parts of so many elements, cut into such of at most `size`: each one's part, place in it, elements."""
    pieces = -(-counts // size)
    part = np.repeat(np.arange(len(counts)), pieces)
    offset = (np.arange(len(part)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
    return part, offset, np.minimum(size, counts[part] - offset)
