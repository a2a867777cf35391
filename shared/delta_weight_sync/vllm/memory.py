"""All live parameters of a model as one table, and the numba kernels that hash and write them on the host.

A piece is a strided part of a checkpoint tensor. It lies in a parameter of vLLM, possibly with other strides.
Its elements are numbered 0, 1, 2, ... in row-major order. From the number follow the position in the
checkpoint tensor and the address in memory. Each change stores the number of its element as an int32, for
finding, hashing and writing it; a piece with too many elements becomes several rows of the table. All changes
of a commit are flat arrays over the whole model, which go to a device in one copy. The host's kernels use one
thread, to leave the cores to vLLM; `gpu` has the same kernels for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
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
from delta_weight_sync.vllm.routes import Geometry, Piece, Route

Row = NDArray[np.int64]
Rows = NDArray[np.int64]
Elements = NDArray[np.int32]
Ulps = NDArray[np.int16]
Found = tuple[int, Elements, Ulps]
"""Row of the table; numbers of its changed elements, int32 [n], strictly increasing; ulps, int16 [n]."""

DIMS = 4
EXPLICIT = -1  # see `Changes`
MOST = (1 << 31) - (1 << 16)  # elements of a row: their numbers must fit int32, also in a last padded block

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
_NO_BLOCK = np.uint64(1 << 63)
_MANY = 1 << 14  # changes whose elements are found together: they fit into the cache
_NEAR = 4096  # changes that are read back while they are still in the cache
SLICES = 60  # of all parameters; `recheck` hashes one of them


class Table:
    """The places of all elements, on one device. `rows`: int64 [pieces, COLUMNS]. `of`: checkpoint name ->
    indices of its rows."""

    def __init__(self, routes: Mapping[str, Route], owned: Mapping[str, Sequence[int]]) -> None:
        """`owned`: for each tensor, the indices of the pieces that this worker adds to the digest."""
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
        if any(memory.device != self.device for memory in self.memory):
            raise RouteError("the weights are not on one device; start vLLM without --cpu-offload-gb")

    @property
    def elements(self) -> Index:
        """Number of elements of each row, int64 [pieces]."""
        counts: Index = self.rows[:, SIZES:SOURCE].prod(1)
        return counts


def _rows(name: str, piece: Piece, *, counted: bool) -> Iterator[Row]:
    """A piece's rows: one, or several if it has too many dimensions or elements."""
    for source, target in _parts(piece.source, piece.target):
        row = np.zeros(COLUMNS, np.int64)
        row[ADDRESS] = piece.memory.data_ptr() + 2 * target.offset
        row[SEED] = seed(name).astype(np.int64)
        row[COUNTED], row[FIRST] = counted, source.offset
        for column, values in ((SIZES, source.sizes), (SOURCE, source.strides), (TARGET, target.strides)):
            row[column : column + DIMS] = 1
            row[column + DIMS - len(values) : column + DIMS] = values
        yield row


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
def _bounds(rows: Rows, which: Index, low: Index, high: Index, index: Index) -> int:
    """Narrow each part's range of `index` to what row `which` can hold; returns the sum of the sizes."""
    total = 0
    for p in range(which.size):
        row, near = rows[which[p]], index[low[p] : high[p]]
        end = row[FIRST] + 1
        for dim in range(DIMS):
            end += (row[SIZES + dim] - 1) * row[SOURCE + dim]
        low[p], high[p] = low[p] + np.searchsorted(near, row[FIRST]), low[p] + np.searchsorted(near, end)
        total += high[p] - low[p]
    return total


@kernel
def _find(
    rows: Rows,
    flat: NDArray[np.bool_],
    which: Index,
    low: Index,
    high: Index,
    index: Index,
    element: Elements,
    taken: Index,
) -> None:
    """For each part, find the positions in `index` that row `which` holds: their element numbers and places.

    `high` gets the ends of the parts. `taken` is not written for `flat` parts: they have all after `low`."""
    at = 0
    for p in range(which.size):
        row, near = rows[which[p]], index[low[p] : high[p]]
        if flat[p]:
            part = element[at:]
            for j in range(near.size):  # over a slice from its start, which becomes vector instructions
                part[j] = near[j] - row[FIRST]
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
                    element[at], taken[at] = number, low[p] + j
                    at += 1
        high[p] = at


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


def collect(found: Iterable[Found], table: Table) -> Changes:
    """Join all that was found into one `Changes`. A row may be found in several parts, which do not
    overlap."""
    sparse, dense, numbers, elements = [], [], [], table.elements.tolist()
    for row, element, ulps in found:
        if _DENSE * element.size > elements[row]:
            first = int(element[0])  # only the found part becomes dense: another part may change the rest
            every = np.zeros(int(element[-1]) - first + 1, np.int16)
            every[element - first] = ulps
            dense.append((row, first, every))
        elif element.size:
            sparse.append((row, EXPLICIT, ulps))
            numbers.append(element)
    parts = np.array([(row, 0, ulps.size, start) for row, start, ulps in sparse + dense], np.int64)
    parts = parts.reshape(-1, 4)
    parts[:, 1] = np.cumsum(parts[:, 2]) - parts[:, 2]
    return Changes(parts, join(numbers, np.int32), join([ulps for *_, ulps in sparse + dense], np.int16))


def of_patches(patches: Iterable[Patch], table: Table) -> Iterator[Found]:
    """Find the changes of patches, row by row; small patches are handled together."""
    flat = (table.rows[:, SIZES : SOURCE - 1] == 1).all(1) & (table.rows[:, TARGET - 1] == 1)
    known = [patch for patch in patches if patch.name in table.of]
    cuts = np.flatnonzero(np.diff(np.cumsum([patch.index.size for patch in known]) // _MANY)) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(known)] if known else []):
        some = known[begin:end]
        rows = [table.of[patch.name] for patch in some]
        which = np.concatenate([np.arange(each.start, each.stop) for each in rows])
        ends, times = np.cumsum([patch.index.size for patch in some]), [len(each) for each in rows]
        index, ulps = join([p.index for p in some], np.int64), join([p.ulps for p in some], np.uint16)
        low, high = np.repeat(np.append(0, ends[:-1]), times), np.repeat(ends, times)
        count = _bounds(table.rows, which, low, high, index)
        element, taken = np.empty(count, np.int32), np.empty(count, np.int64)
        _find(table.rows, flat[which], which, low, high, index, element, taken)
        moved, parts = ulps.view(np.int16), pairwise([0, *high.tolist()])
        for row, whole, first, (a, b) in zip(
            which.tolist(), flat[which].tolist(), low.tolist(), parts, strict=True
        ):
            yield row, element[a:b], moved[first : first + b - a] if whole else moved[taken[a:b]]


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

        @contextmanager
        def writing() -> Iterator[None]:
            self._writes += 1
            try:
                yield
            finally:
                self._writes += 1

        def do() -> tuple[int, float]:
            nonlocal before
            before = self._digests
            with writing():
                wrong = int(_put(rows, parts, element, new))
                self._digests = before + moved
            return wrong, 0.0

        def undo() -> None:
            with writing():
                _put(rows, parts, element, new - changes.ulps)
                self._digests = before

        return Step(do, undo), int(moved[rows[:, COUNTED] == 1].sum())


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
        if row[SIZES + DIMS - 2] == 1 and row[TARGET + DIMS - 1] == 1:
            bits[at : at + count] = carray(pointer(row[ADDRESS] + 2 * first), count)
        else:
            memory = pointer(row[ADDRESS])
            for j in range(count):
                bits[at + j] = memory[_at(row, TARGET, first + j)]
        at += count


@kernel
def _look(
    rows: Rows,
    parts: Rows,
    element: Elements,
    ulps: Ulps,
    new: Ulps,
    moved: NDArray[np.uint64],
    inner: Any,
) -> None:
    """Fill `new` with the bits after the changes, and add each row's change of the digest to `moved`."""
    for p in range(parts.shape[0]):
        row, first, last, start = rows[parts[p, 0]], parts[p, 1], parts[p, 1] + parts[p, 2], parts[p, 3]
        if start < 0 and row[SIZES + DIMS - 2] == 1:
            by = _look_along(row, element[first:last], ulps[first:last], new[first:last], inner)
        else:
            by = _look_any(row, first, last, start, element, ulps, new, inner)
        moved[parts[p, 0]] += by


@kernel
def _look_along(row: Rows, element: Elements, ulps: Ulps, new: Ulps, inner: Any) -> np.uint64:
    """As `_look`, for one part with one dimension and explicit elements. The first of the two loops only
    reads, so that many waits for memory overlap."""
    memory, stride = pointer(row[ADDRESS]), row[TARGET + DIMS - 1]
    for j in range(element.size):
        new[j] = np.int16(memory[np.int64(element[j]) * stride])
    base, seed, step = np.uint64(row[FIRST]), np.uint64(row[SEED]), np.uint64(row[SOURCE + DIMS - 1])
    total, block, factor = np.uint64(0), _NO_BLOCK, np.uint64(0)
    for j in range(element.size):
        old = np.uint16(new[j])
        value = np.uint16(old + np.uint16(ulps[j]))
        new[j] = np.int16(value)
        i = base + np.uint64(element[j]) * step
        if i // np.uint64(BLOCK) != block:
            block = i // np.uint64(BLOCK)
            factor = outer(seed, block)
        total += factor * np.uint64(inner[i % np.uint64(BLOCK)]) * (np.uint64(value) - np.uint64(old))
    return total


@kernel
def _look_any(
    row: Rows, first: int, last: int, start: int, element: Elements, ulps: Ulps, new: Ulps, inner: Any
) -> np.uint64:
    """As `_look`, for one part with several dimensions or with consecutive elements."""
    memory, seed = pointer(row[ADDRESS]), np.uint64(row[SEED])
    total, block, factor = np.uint64(0), _NO_BLOCK, np.uint64(0)
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        old = memory[_at(row, TARGET, number)]
        value = np.uint16(old + np.uint16(ulps[j]))
        new[j] = np.int16(value)
        i = np.uint64(row[FIRST] + _at(row, SOURCE, number))
        if i // np.uint64(BLOCK) != block:  # neighbours share a block
            block = i // np.uint64(BLOCK)
            factor = outer(seed, block)
        total += factor * np.uint64(inner[i % np.uint64(BLOCK)]) * (np.uint64(value) - np.uint64(old))
    return total


@kernel
def _put(rows: Rows, parts: Rows, element: Elements, values: Ulps) -> int:
    """Write and read back; returns how many elements read back differently."""
    wrong = 0
    for p in range(parts.shape[0]):
        row, first, last, start = rows[parts[p, 0]], parts[p, 1], parts[p, 1] + parts[p, 2], parts[p, 3]
        memory, stride = pointer(row[ADDRESS]), row[TARGET + DIMS - 1]
        if start >= 0 or row[SIZES + DIMS - 2] != 1:
            wrong += _put_any(row, first, last, start, element, values)
            continue
        for near in range(first, last, _NEAR):  # in stretches, so that the cache still holds what was written
            upto = min(near + _NEAR, last)
            for j in range(near, upto):
                memory[np.int64(element[j]) * stride] = np.uint16(values[j])
            for j in range(near, upto):
                wrong += memory[np.int64(element[j]) * stride] != np.uint16(values[j])
    return wrong


@kernel
def _put_any(row: Rows, first: int, last: int, start: int, element: Elements, values: Ulps) -> int:
    """As `_put`, for one part with several dimensions or with consecutive elements."""
    wrong, memory = 0, pointer(row[ADDRESS])
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        memory[_at(row, TARGET, number)] = np.uint16(values[j])
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        wrong += memory[_at(row, TARGET, number)] != np.uint16(values[j])
    return wrong
