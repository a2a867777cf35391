"""All live parameters of a model as one table, and the numba kernels that hash and write them on the host.

A piece is a strided part of a checkpoint tensor that lies in a parameter of vLLM, possibly with other
strides. Its elements are numbered 0, 1, 2, ... in row-major order. The number gives the position in the
checkpoint tensor and the address in memory. Changes store it as an int32, so a piece with too many elements
becomes several rows of the table. All changes of a commit are flat arrays over the whole model, which go to a
device in one copy. The host's kernels use one thread, to leave the cores to vLLM; `gpu` has the same kernels
for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.codec._patch import join
from delta_weight_sync.digest import BLOCK, INNER, hash_dense, outer, seed
from delta_weight_sync.errors import RouteError
from delta_weight_sync.util import kernel
from delta_weight_sync.vllm.routes import Geometry, Route

Row = NDArray[np.int64]
Rows = NDArray[np.int64]
Elements = NDArray[np.int32]
Ulps = NDArray[np.int16]

DIMS = 4
EXPLICIT = -1  # see `Changes`
MOST = (1 << 31) - (1 << 16)  # elements of a row: their numbers, and those of a padded block, must fit int32

# The columns. Sizes and strides have DIMS columns each, outer dimension first, padded in front with ones.
ADDRESS = 0  # of element 0, in bytes
SEED = 1  # of the tensor in the digest, its 64 bits as an int64
COUNTED = 2  # 1 if this worker adds the piece to the digest
FIRST = 3  # position of element 0 in the checkpoint tensor
SIZES = 4
SOURCE = SIZES + DIMS  # strides in the checkpoint tensor, in elements
TARGET = SOURCE + DIMS  # strides in memory, in elements of 2 bytes
COLUMNS = TARGET + DIMS

_DENSE = 2  # if more than one in two elements change, storing every element takes less memory
_NO_BLOCK = np.uint64(1 << 63)  # no block has this number
_MANY = 1 << 14  # changes that `of_patches` handles together: they fit into the cache
_NEAR = 1024  # changes that are read back while they are still in the cache
SLICES = 60  # of all parameters; `recheck` hashes one slice


class Table:
    """The places of all elements, on one device.

    `rows`: int64 [pieces, COLUMNS]. `of`: checkpoint name -> indices of its rows.
    """

    def __init__(self, routes: Mapping[str, Route], owned: Mapping[str, Sequence[int]]) -> None:
        """`owned`: for each tensor, the indices of the pieces that this worker adds to the digest."""
        rows: list[list[int]] = []
        self.of: dict[str, range] = {}
        for name, numbers in owned.items():
            first, key = len(rows), int(seed(name).astype(np.int64))
            for number, piece in enumerate(routes[name].pieces):
                start = piece.memory.data_ptr()
                for source, target in _parts(piece.source, piece.target):  # mostly one
                    fixed = [start + 2 * target.offset, key, number in numbers, source.offset]
                    pad = [1] * (DIMS - len(source.sizes))
                    shapes = source.sizes, source.strides, target.strides
                    rows.append(fixed + [each for shape in shapes for each in (*pad, *shape)])
            self.of[name] = range(first, len(rows))
        self.rows = np.array(rows, np.int64).reshape(-1, COLUMNS)
        self.memory = [piece.memory for name in owned for piece in routes[name].pieces]
        self.device = self.memory[0].device if self.memory else torch.device("cpu")
        if any(memory.device != self.device for memory in self.memory):
            raise RouteError("the weights are not on one device; start vLLM without --cpu-offload-gb")

    @property
    def elements(self) -> Index:
        """Number of elements of each row, int64 [pieces]."""
        counts: Index = self.rows[:, SIZES:SOURCE].prod(1)
        return counts


def _parts(source: Geometry, target: Geometry) -> Iterator[tuple[Geometry, Geometry]]:
    """Split a piece into parts with at most DIMS dimensions and MOST elements."""
    length, *inner = source.sizes
    if len(inner) < DIMS and math.prod(source.sizes) <= MOST:
        yield source, target
        return
    take = 1 if inner else MOST
    for start in range(0, length, take):
        sizes = tuple(inner) or (min(take, length - start),)
        both = (
            Geometry(whole.offset + start * whole.strides[0], sizes, whole.strides[-len(sizes) :])
            for whole in (source, target)
        )
        yield from _parts(*both)


@kernel
def _bounds(rows: Rows, found: Index, index: Index) -> int:
    """Narrow each part's range of `index` to what its row can hold; returns the sum of the sizes."""
    total = 0
    for p in range(found.shape[1]):
        row, low, high = rows[found[0, p]], found[1, p], found[2, p]
        near, end = index[low:high], row[FIRST] + 1
        for dim in range(DIMS):
            end += (row[SIZES + dim] - 1) * row[SOURCE + dim]
        found[1, p] = low + np.searchsorted(near, row[FIRST])
        found[2, p] = low + np.searchsorted(near, end)
        total += found[2, p] - found[1, p]
    return total


@kernel
def _find(
    rows: Rows,
    flat: NDArray[np.bool_],
    found: Index,
    index: Index,
    ulps: Ulps,
    element: Elements,
    moved: Ulps,
) -> None:
    """Write the element number and the ulps of each change that a part holds.

    `found`, int64 [3, p]: rows of the parts; their ranges of `index` by `_bounds`, whose ends become counts.
    """
    at = 0
    for p in range(found.shape[1]):
        row, low = rows[found[0, p]], found[1, p]
        near, numbers, amounts, begin = index[low : found[2, p]], element[at:], moved[at:], at
        if flat[found[0, p]]:
            base, whole = row[FIRST], ulps[low:]
            for j in range(near.size):  # over slices from their starts, which become vector instructions
                numbers[j] = near[j] - base
            for j in range(near.size):
                amounts[j] = whole[j]
            at += near.size
        else:
            for j in range(near.size):
                rest, number, inside = near[j] - row[FIRST], np.int64(0), True
                for dim in range(DIMS):
                    size, stride = row[SIZES + dim], row[SOURCE + dim]
                    if size > 1:
                        steps = rest // stride
                        inside = inside and steps < size
                        rest -= steps * stride
                        number = number * size + steps
                if inside and rest == 0:
                    element[at], moved[at] = number, ulps[low + j]
                    at += 1
        found[2, p] = at - begin


def part_of(row: Row, tensor: Bits) -> Bits:
    """A row's elements of its checkpoint tensor, in the order of their numbers."""
    sizes, strides = row[SIZES:SOURCE].tolist(), (2 * row[SOURCE:TARGET]).tolist()
    return as_strided(tensor.reshape(-1)[row[FIRST] :], sizes, strides).reshape(-1)


def cut(counts: Index, size: int) -> tuple[Index, Index, Index]:
    """Cut parts of `counts` elements into blocks of at most `size`. Per block: its part, offset, count."""
    pieces = -(-counts // size)
    part = np.repeat(np.arange(len(counts)), pieces)
    offset = (np.arange(len(part)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
    return part, offset, np.minimum(size, counts[part] - offset)


@dataclass(frozen=True)
class Changes:
    """Changes of a whole model.

    `parts`, int64 [p, 4]: row of the table; first change in `ulps`; number of changes; number of the first
    element if all are consecutive, else EXPLICIT: then `element` has their numbers, at the places of `ulps`.
    """

    parts: NDArray[np.int64]
    element: Elements  # [m], m <= n
    ulps: Ulps  # [n], added to the bits modulo 2^16

    def blocks(self, size: int) -> NDArray[np.int64]:
        """The parts, cut into blocks of at most `size` changes."""
        part, offset, count = cut(self.parts[:, 2], size)
        blocks = self.parts[part]
        blocks[:, 1] += offset
        blocks[:, 2] = count
        blocks[:, 3] += np.where(blocks[:, 3] == EXPLICIT, 0, offset)
        return blocks


class Found(NamedTuple):
    """Changes of some rows of the table. A row may be in several of these, which do not overlap."""

    rows: Index  # int64 [p]
    counts: Index  # int64 [p], changes of each row
    element: Elements  # int32 [n], strictly increasing for each of `rows`
    ulps: Ulps  # int16 [n]


def collect(found: Iterable[Found], table: Table) -> Changes:
    """Join all that was found into one `Changes`."""
    parts = list(found)
    rows, counts = join([part.rows for part in parts], np.int64), join([p.counts for p in parts], np.int64)
    element, ulps = join([p.element for p in parts], np.int32), join([p.ulps for p in parts], np.int16)
    dense, first = _DENSE * counts > table.elements[rows], np.cumsum(counts) - counts
    starts, every, listed, end = [], [], [], 0
    for at, count in zip(first[dense].tolist(), counts[dense].tolist(), strict=True):
        numbers = element[at : at + count]  # only this part becomes dense: another may change the rest
        starts.append(int(numbers[0]))
        every.append(np.zeros(int(numbers[-1]) - starts[-1] + 1, np.int16))
        every[-1][numbers - starts[-1]] = ulps[at : at + count]
        listed.append(slice(end, at))
        end = at + count
    listed.append(slice(end, None))
    element = join([element[each] for each in listed], np.int32)
    ulps = join([*(ulps[each] for each in listed), *every], np.int16)
    sparse = ~dense & (counts > 0)
    sizes = np.append(counts[sparse], np.array([each.size for each in every], np.int64))
    numbered = np.append(np.full(sparse.sum(), EXPLICIT), np.array(starts, np.int64))
    columns = np.append(rows[sparse], rows[dense]), np.cumsum(sizes) - sizes, sizes, numbered
    return Changes(np.stack(columns, 1), element, ulps)


def of_patches(patches: Iterable[Patch], table: Table) -> Iterator[Found]:
    """Find the changes of patches; small patches are handled together."""
    flat = (table.rows[:, SIZES : SOURCE - 1] == 1).all(1) & (table.rows[:, TARGET - 1] == 1)
    known = [patch for patch in patches if patch.name in table.of]
    ends = np.cumsum([patch.index.size for patch in known])
    cuts = np.flatnonzero(np.diff(ends // _MANY)) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(known)] if known else []):
        some = known[begin:end]
        index, ulps = join([p.index for p in some], np.int64), join([p.ulps for p in some], np.uint16)
        spans, last = [table.of[p.name] for p in some], np.cumsum([p.index.size for p in some])
        ranges = np.stack([np.append(0, last[:-1]), last]).repeat([len(span) for span in spans], 1)
        found = np.vstack([np.fromiter(chain(*spans), np.int64), ranges])
        count = _bounds(table.rows, found, index)
        element, moved = np.empty(count, np.int32), np.empty(count, np.int16)
        _find(table.rows, flat, found, index, ulps.view(np.int16), element, moved)
        count = found[2].sum()
        yield Found(found[0], found[2], element[:count], moved[:count])


class Step(NamedTuple):
    """One part of a commit.

    `do` writes. It returns how many elements read back differently from the new bits, and how many seconds it
    waited for earlier work on the device. `undo` puts the old bits back, even if `do` wrote only some.
    """

    do: Callable[[], tuple[int, float]]
    undo: Callable[[], object]


class HostMemory:
    """The parameters of a `Table` on the host.

    It knows each row's digest: the one found when the row was last hashed, plus the changes of later commits.
    If a commit writes while a row is hashed, that hash is dropped.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._digests = np.zeros(len(table.rows), np.uint64)
        self._writes = 0  # odd while a commit or an undo writes
        ends = table.elements.cumsum()
        shares = np.linspace(0, ends[-1] if ends.size else 0, SLICES + 1)
        self._cuts, self._turn = np.append(np.searchsorted(ends, shares[:-1]), ends.size), 0
        self.prepare(collect((), table))[0].do()  # compile everything now, not in the first commit's pause

    def digest(self) -> int:
        """This worker's share of the live parameters' digest, read from memory."""
        self._digests = _digest(self._table.rows, INNER)
        return self.known_digest()

    def known_digest(self) -> int:
        """Like `digest`, but from earlier readings and commits, without a new reading."""
        return int(self._digests[self._table.rows[:, COUNTED] == 1].sum())

    def recheck(self) -> None:
        """Hash the next slice of the parameters again. If it differs, so does `known_digest` from now on."""
        part, before = slice(*self._cuts[self._turn : self._turn + 2]), self._writes
        found = _digest(self._table.rows[part], INNER)
        if before == self._writes and before % 2 == 0:
            self._digests[part] = found
            self._turn = (self._turn + 1) % SLICES

    def read(self, parts: Rows) -> Bits:
        """Live bits of parts, int64 [p, 3]: row of the table, first element, number of elements."""
        bits = np.empty(parts[:, 2].sum(), np.uint16)
        _read(self._table.rows, parts, bits)
        return bits

    def prepare(self, changes: Changes) -> tuple[Step, int]:
        """The step that writes the changes, and how much it changes this worker's share of the digest."""
        new = np.empty_like(changes.ulps)  # int16 [n], the bits after the changes
        rows, parts, element = self._table.rows, changes.parts, changes.element
        moved, before = np.zeros(len(rows), np.uint64), self._digests
        _look(rows, parts, element, changes.ulps, new, moved, INNER)

        def write(values: Ulps, digests: NDArray[np.uint64]) -> tuple[int, float]:
            self._writes += 1
            try:
                wrong = int(_put(rows, parts, element, values))
                self._digests = digests
            finally:
                self._writes += 1
            return wrong, 0.0

        def do() -> tuple[int, float]:
            nonlocal before
            before = self._digests
            return write(new, before + moved)

        step = Step(do, lambda: write(new - changes.ulps, before))
        return step, int(moved[rows[:, COUNTED] == 1].sum())


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """A pointer to the bf16 bits at an address."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(16)))

    return types.CPointer(types.uint16)(types.int64), emit


@kernel
def _at(row: Rows, strides: int, element: Any) -> Any:
    """Offset of an element from the row's first: in the checkpoint (`strides`: SOURCE) or memory (TARGET)."""
    if row[SIZES + DIMS - 2] == 1:  # sizes are padded in front, so this row has one dimension
        return element * row[strides + DIMS - 1]
    at = np.int64(0)
    for dim in range(DIMS - 1, -1, -1):
        size = row[SIZES + dim]
        at += (element % size) * row[strides + dim]
        element //= size
    return at


@kernel
def _digest(rows: Rows, inner: Any) -> NDArray[np.uint64]:
    """The digest of each row."""
    totals = np.zeros(rows.shape[0], np.uint64)
    for r in range(rows.shape[0]):
        row = rows[r]
        length = row[SIZES + DIMS - 1]
        for start in range(0, row[SIZES : SIZES + DIMS].prod(), length):
            totals[r] += _digest_run(row, start, length, inner)
    return totals


@kernel
def _digest_run(row: Rows, start: int, length: int, inner: Any) -> np.uint64:
    """The digest of elements that differ in the innermost dimension only."""
    first, place = row[FIRST] + _at(row, SOURCE, start), _at(row, TARGET, start)
    step, stride, seed = row[SOURCE + DIMS - 1], row[TARGET + DIMS - 1], np.uint64(row[SEED])
    memory = pointer(row[ADDRESS] + 2 * place)
    if step == 1 and stride == 1:
        return hash_dense(carray(memory, length), first, inner, seed)
    total = np.uint64(0)
    for j in range(length):
        i = np.uint64(first + j * step)
        factor = outer(seed, i // np.uint64(BLOCK)) * np.uint64(inner[i % np.uint64(BLOCK)])
        total += factor * np.uint64(memory[j * stride])
    return total


@kernel
def _read(rows: Rows, parts: Rows, bits: Bits) -> None:
    at = 0
    for p in range(parts.shape[0]):
        row, first, count = rows[parts[p, 0]], parts[p, 1], parts[p, 2]
        memory = pointer(row[ADDRESS])
        if row[SIZES + DIMS - 2] == 1 and row[TARGET + DIMS - 1] == 1:
            bits[at : at + count] = carray(memory, first + count)[first:]
        else:
            for j in range(count):
                bits[at + j] = memory[_at(row, TARGET, first + j)]
        at += count


@kernel
def _places(row: Row, strides: int, part: Row, element: Elements, first: int, places: Index) -> None:
    """Fill `places` with the offsets of a part's changes from `first` on, as `_at` gives them."""
    start, stride, flat = part[3], row[strides + DIMS - 1], row[SIZES + DIMS - 2] == 1
    if start < 0 and flat:
        numbers = element[first:]
        for j in range(places.size):
            places[j] = numbers[j] * stride
    else:
        for j in range(places.size):
            number = np.int64(element[first + j]) if start < 0 else start + first + j - part[1]
            places[j] = number * stride if flat else _at(row, strides, number)


@kernel
def _look(
    rows: Rows, parts: Rows, element: Elements, ulps: Ulps, new: Ulps, moved: NDArray[np.uint64], inner: Any
) -> None:
    """Fill `new` with the bits after the changes, and add each row's change of the digest to `moved`."""
    scratch = np.empty(_NEAR, np.int64)
    for p in range(parts.shape[0]):
        part, row, last = parts[p], rows[parts[p, 0]], parts[p, 1] + parts[p, 2]
        memory, base, seed = pointer(row[ADDRESS]), np.uint64(row[FIRST]), np.uint64(row[SEED])
        total, block, factor = np.uint64(0), _NO_BLOCK, np.uint64(0)
        for near in range(part[1], last, _NEAR):
            places = scratch[: min(_NEAR, last - near)]
            _places(row, TARGET, part, element, near, places)
            values, amounts = new[near:], ulps[near:]
            for j in range(places.size):  # only reads, so that many waits for memory overlap
                values[j] = np.int16(memory[places[j]])
            if row[SIZES + DIMS - 2] != 1 or row[SOURCE + DIMS - 1] != row[TARGET + DIMS - 1]:
                _places(row, SOURCE, part, element, near, places)
            for j in range(places.size):
                old = np.uint16(values[j])
                value = np.uint16(old + np.uint16(amounts[j]))
                values[j] = np.int16(value)
                i = base + np.uint64(places[j])
                if i // np.uint64(BLOCK) != block:  # neighbours share a block
                    block = i // np.uint64(BLOCK)
                    factor = outer(seed, block)
                total += factor * np.uint64(inner[i % np.uint64(BLOCK)]) * (np.uint64(value) - np.uint64(old))
        moved[part[0]] += total


@kernel
def _put(rows: Rows, parts: Rows, element: Elements, values: Ulps) -> int:
    """Write and read back; returns how many elements read back differently."""
    wrong, scratch = 0, np.empty(_NEAR, np.int64)
    for p in range(parts.shape[0]):
        part, row, last = parts[p], rows[parts[p, 0]], parts[p, 1] + parts[p, 2]
        memory = pointer(row[ADDRESS])
        for near in range(
            part[1], last, _NEAR
        ):  # in stretches, so that the cache still holds what was written
            places = scratch[: min(_NEAR, last - near)]
            _places(row, TARGET, part, element, near, places)
            for j in range(places.size):
                memory[places[j]] = np.uint16(values[near + j])
            for j in range(places.size):
                wrong += memory[places[j]] != np.uint16(values[near + j])
    return wrong
