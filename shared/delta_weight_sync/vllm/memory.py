"""All live parameters of a model as one table, and the numba loops that hash and write them on the host.

A piece is a strided part of a checkpoint tensor that lies in a parameter of vLLM, possibly with other
strides. A piece's elements are numbered 0, 1, 2, ... in row-major order. The number gives the position in the
checkpoint tensor and the address in memory. Changes store the number as an int32, so a piece with too many
elements becomes several rows of the table. If there are many changes, several threads share the work, on up
to half of the host's cores. `gpu` does the same with tensor operations, on a GPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numba import carray
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from delta_weight_sync import util
from delta_weight_sync.codec import Bits, Decoded, Index, cut, join
from delta_weight_sync.digest import BLOCK, INNER, add_at, hash_dense, outer, seed
from delta_weight_sync.errors import RouteError
from delta_weight_sync.kernels import kernel, pointer
from delta_weight_sync.util import in_order
from delta_weight_sync.vllm.routes import Geometry, Route

Row = NDArray[np.int64]
Rows = NDArray[np.int64]
Elements = NDArray[np.int32]
Result = TypeVar("Result")

DIMS = 4
MOST = (1 << 31) - 1  # limit of elements of a row: an int32 must hold each number

# The columns. Sizes and strides have DIMS columns each, outer dimension first, padded in front with ones.
# `routes.joined` dropped dimensions of size 1, so a row has one dimension if the size before the last is 1.
ADDRESS = 0  # of element 0, in bytes
SEED = 1  # the tensor's seed in the digest: its 64 bits as an int64
COUNTED = 2  # 1 if this worker adds the piece to the digest
FIRST = 3  # position of element 0 in the checkpoint tensor
SIZES = 4
SOURCE = SIZES + DIMS  # strides in the checkpoint tensor, in elements
TARGET = SOURCE + DIMS  # strides in memory, in elements of 2 bytes
COLUMNS = TARGET + DIMS

_NEAR = 1024  # changes in a block: so few that a block is still in the cache when `_put` reads it back
_SHARED = 1 << 16  # changes that are worth a thread of their own
SLICES = 60  # slices of all parameters; `recheck` hashes one slice


class Table:
    """The places of all elements, on one device.

    `rows`: int64 [rows, COLUMNS]; a piece with too many elements or dimensions has several rows. `number`
    maps checkpoint names to 0, 1, 2, ... Tensor n has the rows from `starts[n]` up to `starts[n + 1]`.
    Tensors that are not in the table share the number after the last, which has no rows.
    """

    def __init__(self, routes: Mapping[str, Route], owned: Mapping[str, Sequence[int]]) -> None:
        """`owned`: for each tensor, the indices of the pieces that this worker adds to the digest."""
        rows: list[list[int]] = []
        self.number = {name: number for number, name in enumerate(owned)}
        starts = []
        for name, counted in owned.items():
            starts.append(len(rows))
            key = int(seed(name).astype(np.int64))
            for index, piece in enumerate(routes[name].pieces):
                start = piece.memory.data_ptr()
                for source, target in _parts(piece.source, piece.target):  # mostly one part
                    fixed = [start + 2 * target.offset, key, index in counted, source.offset]
                    pad = [1] * (DIMS - len(source.sizes))
                    shapes = source.sizes, source.strides, target.strides
                    rows.append(fixed + [each for shape in shapes for each in (*pad, *shape)])
        self.starts = np.array([*starts, len(rows), len(rows)])
        self.rows = np.array(rows, np.int64).reshape(-1, COLUMNS)
        self.memory = [piece.memory for name in owned for piece in routes[name].pieces]
        self.device = self.memory[0].device if self.memory else torch.device("cpu")
        if any(memory.device != self.device for memory in self.memory):
            raise RouteError("the weights are not on one device; start vLLM without --cpu-offload-gb")

    @property
    def parts(self) -> Rows:
        """int64 [rows, 3]: the number of each row, its first element (0), and its number of elements."""
        number = np.arange(len(self.rows))
        return np.stack([number, 0 * number, self.rows[:, SIZES:SOURCE].prod(1)], 1)


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
def _bounds(rows: Rows, found: Index, index: Index) -> None:
    """Narrow ranges to positions that their row spans. `found` has a range of `index` for each row."""
    for p in range(found.shape[1]):
        row = rows[found[0, p]]
        low = found[1, p]
        high = found[2, p]
        near = index[low:high]
        end = row[FIRST] + 1
        for dim in range(DIMS):
            end += (row[SIZES + dim] - 1) * row[SOURCE + dim]
        if near.size and not row[FIRST] <= near[0] <= near[-1] < end:  # rare: most rows are whole tensors
            found[1, p] = low + np.searchsorted(near, row[FIRST])
            found[2, p] = low + np.searchsorted(near, end)


@kernel
def _find(rows: Rows, found: Index, index: Index, ulps: Bits, element: Elements, amount: Bits) -> None:
    """Find the changes in rows. Write each one's number within its row to `element`, its ulps to `amount`.

    `found`, int64 [3, p], has the numbers of rows, then the start and the end of each row's range of `index`,
    narrowed by `_bounds`. `_find` replaces each end by the number of changes that it found in the row.
    """
    at = 0
    for p in range(found.shape[1]):
        row = rows[found[0, p]]
        low = found[1, p]
        near = index[low : found[2, p]]
        numbers = element[at:]
        amounts = amount[at:]
        begin = at
        if row[SIZES + DIMS - 2] == 1 and row[SOURCE + DIMS - 1] == 1:  # contiguous in the checkpoint
            base = row[FIRST]
            whole = ulps[low:]
            for j in range(near.size):  # both loops index slices from 0, so they vectorize
                numbers[j] = near[j] - base
            for j in range(near.size):
                amounts[j] = whole[j]
            at += near.size
        else:
            for j in range(near.size):
                rest = near[j] - row[FIRST]
                number = np.int64(0)
                inside = True
                for dim in range(DIMS):
                    size = row[SIZES + dim]
                    stride = row[SOURCE + dim]
                    if size > 1:
                        steps = rest // stride
                        inside = inside and steps < size
                        rest -= steps * stride
                        number = number * size + steps
                if inside and rest == 0:
                    element[at] = number
                    amount[at] = ulps[low + j]
                    at += 1
        found[2, p] = at - begin


def part_of(row: Row, tensor: Bits) -> Bits:
    """A row's elements of its checkpoint tensor, in the order of their numbers."""
    sizes = row[SIZES:SOURCE].tolist()
    strides = (2 * row[SOURCE:TARGET]).tolist()
    return as_strided(tensor.reshape(-1)[row[FIRST] :], sizes, strides).reshape(-1)


class Changes(NamedTuple):
    """Changes of some rows of the table. A row may be listed several times, but an element only once."""

    rows: Index  # int64 [p]
    counts: Index  # int64 [p], number of changes of each row
    element: Elements  # int32 [n], strictly increasing for each of `rows`
    ulps: Bits  # uint16 [n], added to the bits modulo 2^16

    @classmethod
    def joined(cls, found: "Iterable[Changes]") -> "Changes":
        """Join changes of different elements."""
        columns = [[*column] for column in zip(*found, strict=True)] or [[], [], [], []]
        kinds = np.int64, np.int64, np.int32, np.uint16
        return cls(*(join(columns.pop(0), kind) for kind in kinds))  # `pop` frees what is joined

    def blocks(self, size: int) -> Rows:
        """int64 [b, 3]: the row, the first change and the number of changes of blocks of at most `size`."""
        return cut(np.stack([self.rows, self.counts.cumsum() - self.counts, self.counts], 1), size)


def find(decoded: Iterable[Decoded], tables: Sequence[Table]) -> list[Changes]:
    """Find the changes of a delta in each of `tables`, one per worker. A table may lack tensors."""

    def find_in(table: Table, part: Decoded, number: Index) -> Changes:
        first = table.starts[number]
        ends = part.changes.cumsum()
        count = table.starts[number + 1] - first
        # The rows of all tensors of `part`; for each row, the range of its tensor's changes in `part.index`.
        rows = np.repeat(first - count.cumsum() + count, count) + np.arange(count.sum())
        found = np.stack([rows, np.repeat(ends - part.changes, count), np.repeat(ends, count)])
        _bounds(table.rows, found, part.index)
        size = (found[2] - found[1]).sum()
        element = np.empty(size, np.int32)
        amount = np.empty(size, np.uint16)
        _find(table.rows, found, part.index, part.ulps, element, amount)
        size = found[2].sum()
        return Changes(found[0], found[2], element[:size], amount[:size])

    def find_in_all(part: Decoded) -> list[Changes]:
        known = tables[0].number
        nowhere = repeat(len(tables[0].number))
        number = np.fromiter(map(known.get, part.names, nowhere), np.int64, len(part.names))
        return [find_in(table, part, number) for table in tables]

    found = [*in_order(find_in_all, decoded)]
    return [Changes.joined(parts[at] for parts in found) for at in range(len(tables))]


class Step(NamedTuple):
    """One part of a commit.

    `do` writes. It returns how many elements read back differently from the new bits, and how many seconds it
    waited for earlier work on the device. `undo` puts the old bits back, even if `do` wrote only some.
    """

    do: Callable[[], tuple[int, float]]
    undo: Callable[[], object]


Write = Callable[[bool], tuple[int, float]]  # puts the old bits back if it is given True; the answer of `do`


class Memory(ABC):
    """The parameters of a `Table`, hashed, read and written where they are.

    This object keeps each row's digest, which is the last hash of the row plus the changes of later commits.
    If a commit writes while a row is hashed, that hash is dropped.
    """

    _threads = 1  # that hash slices

    def __init__(self, table: Table) -> None:
        self._table = table
        self._digests = np.zeros(len(table.rows), np.uint64)
        self._writes = 0  # odd while a commit or an undo writes
        ends = table.parts[:, 2].cumsum()
        shares = np.linspace(0, ends[-1] if ends.size else 0, SLICES + 1)
        # The rows at which slices begin, and the end. Slices have about equally many elements.
        self._cuts = np.append(np.searchsorted(ends, shares[:-1]), ends.size)
        self._turn = 0  # the slice that `recheck` hashes next

    @abstractmethod
    def read(self, parts: Rows) -> Bits:
        """Read live bits. `parts` is int64 [p, 3]: row of the table, first element, number of elements."""

    @abstractmethod
    def _hash(self, some: slice) -> NDArray[np.uint64]:
        """The digest of each of these rows."""

    @abstractmethod
    def _prepared(self, changes: Changes) -> tuple[Write, NDArray[np.uint64]]:
        """Return what writes the changes, and how each row's digest changes."""

    def digest(self) -> int:
        """This worker's share of the live parameters' digest, read from memory."""
        slices = (slice(*ends) for ends in pairwise(self._cuts))
        self._digests = np.concatenate([*in_order(self._hash, slices, self._threads)])
        return self.known_digest()

    def known_digest(self) -> int:
        """Like `digest`, but from earlier readings and commits, without a new reading."""
        return int(self._digests[self._table.rows[:, COUNTED] == 1].sum())

    def recheck(self) -> None:
        """Hash the next slice of the parameters again; `known_digest` then uses the new hashes."""
        rows = slice(*self._cuts[self._turn : self._turn + 2])
        before = self._writes
        found = self._hash(rows)
        # If a commit replaces `_digests` between this line and the next one, the old array is written, and no
        # longer read.
        digests = self._digests
        if before == self._writes and before % 2 == 0:
            digests[rows] = found
            self._turn = (self._turn + 1) % SLICES

    def prepare(self, changes: Changes) -> tuple[Step, int]:
        """Return the step that writes the changes, and the change of this worker's share of the digest."""
        write, moved = self._prepared(changes)
        before = self._digests

        def written(old: bool, digests: NDArray[np.uint64]) -> tuple[int, float]:
            self._writes += 1
            try:
                answer = write(old)
                self._digests = digests
            finally:
                self._writes += 1
            return answer

        def do() -> tuple[int, float]:
            nonlocal before
            before = self._digests
            return written(False, before + moved)

        counted = self._table.rows[:, COUNTED] == 1
        return Step(do, lambda: written(True, before)), int(moved[counted].sum())


class HostMemory(Memory):
    """The parameters of a `Table` on the host."""

    _threads = 0  # all

    def read(self, parts: Rows) -> Bits:
        """Read live bits. `parts` is int64 [p, 3]: row of the table, first element, number of elements."""
        bits = np.empty(parts[:, 2].sum(), np.uint16)
        _read(self._table.rows, parts, bits)
        return bits

    def _hash(self, some: slice) -> NDArray[np.uint64]:
        return _digest(self._table.rows[some], INNER)

    def _prepared(self, changes: Changes) -> tuple[Write, NDArray[np.uint64]]:
        new = np.empty_like(changes.ulps)  # the bits after the changes
        rows = self._table.rows
        blocks = changes.blocks(_NEAR)
        element = changes.element
        least = max(1, len(blocks) * _SHARED // max(1, element.size))  # blocks with about `_SHARED` changes

        def look(some: slice) -> NDArray[np.uint64]:
            moved = np.zeros(len(rows), np.uint64)
            _look(rows, blocks[some], element, changes.ulps, new, moved, INNER)
            return moved

        def write(old: bool) -> tuple[int, float]:
            values = new - changes.ulps if old else new
            return sum(_in_parts(lambda s: _put(rows, blocks[s], element, values), len(blocks), least)), 0.0

        moved = np.stack(_in_parts(look, len(blocks), least)).sum(0)
        return write, moved


def _in_parts(work: Callable[[slice], Result], count: int, least: int) -> list[Result]:
    """Call `work` in threads, on up to `util.THREADS` slices of `range(count)`. Return the results in order.
    If there are several slices, each slice has at least `least` items."""
    parts = min(util.THREADS, max(1, count // least))
    cuts = [count * part // parts for part in range(parts + 1)]
    return [*in_order(work, map(slice, cuts, cuts[1:]), parts)]


@kernel
def _at(row: Rows, strides: int, element: Any) -> Any:
    """Offset of an element from the row's first, in the checkpoint (`strides`: SOURCE) or memory (TARGET)."""
    if row[SIZES + DIMS - 2] == 1:  # one dimension
        return element * row[strides + DIMS - 1]
    at = np.int64(0)
    for dim in range(DIMS - 1, -1, -1):
        size = row[SIZES + dim]
        at += (element % size) * row[strides + dim]
        element //= size
    return at


@kernel
def _digest(rows: Rows, inner: Any) -> NDArray[np.uint64]:
    totals = np.zeros(rows.shape[0], np.uint64)
    for r in range(rows.shape[0]):
        row = rows[r]
        seed = np.uint64(rows[r, SEED])
        total = np.uint64(0)
        # of the last dimension
        length = row[SOURCE - 1]
        step = row[TARGET - 1]
        stride = row[COLUMNS - 1]
        for start in range(0, row[SIZES:SOURCE].prod(), length):
            first = row[FIRST] + _at(row, SOURCE, start)
            memory = pointer(row[ADDRESS] + 2 * _at(row, TARGET, start))
            if step == 1 and stride == 1:
                total += hash_dense(carray(memory, length), first, inner, seed)
                continue
            for j in range(length):
                i = np.uint64(first + j * step)
                factor = outer(seed, i // np.uint64(BLOCK)) * np.uint64(inner[i % np.uint64(BLOCK)])
                total += factor * np.uint64(memory[j * stride])
        totals[r] = total
    return totals


@kernel
def _read(rows: Rows, parts: Rows, bits: Bits) -> None:
    at = 0
    for p in range(parts.shape[0]):
        row = rows[parts[p, 0]]
        first = parts[p, 1]
        count = parts[p, 2]
        memory = pointer(row[ADDRESS])
        if row[SIZES + DIMS - 2] == 1 and row[TARGET + DIMS - 1] == 1:
            bits[at : at + count] = carray(memory, first + count)[first:]
        else:
            for j in range(count):
                bits[at + j] = memory[_at(row, TARGET, first + j)]
        at += count


@kernel
def _places(row: Row, strides: int, numbers: Elements, places: Index) -> None:
    """Fill `places` with the offsets of elements, as `_at` gives them."""
    if row[SIZES + DIMS - 2] == 1:
        stride = row[strides + DIMS - 1]
        for j in range(numbers.size):
            places[j] = numbers[j] * stride
    else:
        for j in range(numbers.size):
            places[j] = _at(row, strides, np.int64(numbers[j]))


@kernel
def _look(
    rows: Rows, blocks: Rows, element: Elements, ulps: Bits, new: Bits, moved: NDArray[np.uint64], inner: Any
) -> None:
    """Fill `new` with the bits after the changes, and add each row's change of the digest to `moved`."""
    scratch = np.empty(_NEAR, np.int64)
    lanes = np.arange(_NEAR)
    for b in range(blocks.shape[0]):
        row = rows[blocks[b, 0]]
        first = blocks[b, 1]
        last = blocks[b, 1] + blocks[b, 2]
        memory = pointer(row[ADDRESS])
        numbers = element[first:last]
        bits = new[first:last]
        places = scratch[: numbers.size]
        at = lanes[: numbers.size]
        _places(row, TARGET, numbers, places)
        for j in range(numbers.size):  # only reads, so that many waits for memory overlap
            bits[j] = memory[places[j]]
        # Now the places in the checkpoint. If a row has one dimension and equal strides, they are the same.
        if row[SIZES + DIMS - 2] != 1 or row[SOURCE + DIMS - 1] != row[TARGET + DIMS - 1]:
            _places(row, SOURCE, numbers, places)
        seed = np.uint64(row[SEED])
        moved[blocks[b, 0]] += add_at(bits, at, ulps[first:last], places, row[FIRST], inner, seed)


@kernel
def _put(rows: Rows, blocks: Rows, element: Elements, values: Bits) -> int:
    """Write `values`, and read them back. Returns how many elements read back differently."""
    wrong = 0
    places = np.empty(_NEAR, np.int64)
    for b in range(blocks.shape[0]):
        row = rows[blocks[b, 0]]
        first = blocks[b, 1]
        last = blocks[b, 1] + blocks[b, 2]
        memory = pointer(row[ADDRESS])
        numbers = element[first:last]
        bits = values[first:last]
        _places(row, TARGET, numbers, places)
        for j in range(numbers.size):
            memory[places[j]] = bits[j]
        for j in range(numbers.size):
            wrong += memory[places[j]] != bits[j]
    return wrong
