"""Hashing and writing parameters in host memory: numba, one thread, so that vLLM's own are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from delta_weight_sync.codec import Bits
from delta_weight_sync.digest import BLOCK, INNER, hash_dense, outer
from delta_weight_sync.kernel import kernel
from delta_weight_sync.vllm.changes import Changes, Ulps, collect
from delta_weight_sync.vllm.table import (
    ADDRESS,
    COUNTED,
    DIMS,
    FIRST,
    SEED,
    SIZES,
    SOURCE,
    TARGET,
    Elements,
    Rows,
    Table,
)

_NO_BLOCK = np.uint64(1 << 63)
_NEAR = 4096  # changes that are read back while they are still in the cache


class HostMemory:
    """The parameters of a `Table` on this machine's host."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._warm_up()

    def digest(self) -> int:
        """What this worker counts of the live parameters' digest, read from memory."""
        return int(_digest(self._table.rows, INNER))

    def read(self, parts: Rows) -> Bits:
        """Live bits of parts, one after the other.

        `parts`: int64 [p, 3], of a row of the table the first element and how many.
        """
        bits = np.empty(parts[:, 2].sum(), np.uint16)
        _read(self._table.rows, parts, bits)
        return bits

    def prepare(self, changes: Changes) -> tuple[HostWrite, int]:
        """What writes the changes, and by how much they will move the digest that this worker counts."""
        new = np.empty_like(changes.ulps)
        moved = _look(self._table.rows, changes.parts, changes.element, changes.ulps, new, INNER)
        return HostWrite(self._table, changes, new), int(moved)

    def _warm_up(self) -> None:
        """Let everything be compiled and loaded now, not within the first commit's pause."""
        self.prepare(collect((), self._table))[0].do()


class HostWrite:
    """Writes changes to the live parameters, and takes them back."""

    def __init__(self, table: Table, changes: Changes, new: Ulps) -> None:
        """`new`: int16 [n], the bits that the changes lead to."""
        self.waited_s = 0.0
        self._table, self._changes, self._new = table, changes, new

    def do(self) -> int:
        """Write the new bits; returns how many of them are not there when they are read back."""
        return self._put(self._new)

    def undo(self) -> None:
        """Put the old bits back, however far `do` came."""
        self._put(self._new - self._changes.ulps)

    def _put(self, values: Ulps) -> int:
        return int(_put(self._table.rows, self._changes.parts, self._changes.element, values))


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """The memory of bf16 patterns at an address."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(16)))

    return types.CPointer(types.uint16)(types.int64), emit


@kernel
def _at(row: Rows, strides: int, element: Any) -> Any:
    """Position (`strides`: SOURCE) or place (TARGET) of an element, counted from the row's first."""
    if row[SIZES + DIMS - 2] == 1:  # sizes are filled up in front: the last is the only one
        return element * row[strides + DIMS - 1]
    at = np.int64(0)
    for dim in range(DIMS - 1, -1, -1):
        size = row[SIZES + dim]
        at += (element % size) * row[strides + dim]
        element //= size
    return at


@kernel
def _digest(rows: Rows, inner: Any) -> np.uint64:
    total = np.uint64(0)
    for r in range(rows.shape[0]):
        row = rows[r]
        if row[COUNTED]:
            length = row[SIZES + DIMS - 1]
            for start in range(0, row[SIZES : SIZES + DIMS].prod(), length):
                total += _digest_run(row, start, length, inner)
    return total


@kernel
def _digest_run(row: Rows, start: int, length: int, inner: Any) -> np.uint64:
    """Of elements that differ in the innermost dimension only."""
    first, place = row[FIRST] + _at(row, SOURCE, start), _at(row, TARGET, start)
    step, stride, seed = row[SOURCE + DIMS - 1], row[TARGET + DIMS - 1], np.uint64(row[SEED])
    memory = _pointer(row[ADDRESS] + 2 * place)
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
            bits[at : at + count] = carray(_pointer(row[ADDRESS] + 2 * first), count)
        else:
            memory = _pointer(row[ADDRESS])
            for j in range(count):
                bits[at + j] = memory[_at(row, TARGET, first + j)]
        at += count


@kernel
def _look(rows: Rows, parts: Rows, element: Elements, ulps: Ulps, new: Ulps, inner: Any) -> np.uint64:
    """Fill in `new`; returns by how much the digest moves."""
    total = np.uint64(0)
    for p in range(parts.shape[0]):
        row, first, last, start = rows[parts[p, 0]], parts[p, 1], parts[p, 1] + parts[p, 2], parts[p, 3]
        if start < 0 and row[SIZES + DIMS - 2] == 1:
            moved = _look_along(row, element[first:last], ulps[first:last], new[first:last], inner)
        else:
            moved = _look_any(row, first, last, start, element, ulps, new, inner)
        total += np.uint64(row[COUNTED]) * moved
    return total


@kernel
def _look_along(row: Rows, element: Elements, ulps: Ulps, new: Ulps, inner: Any) -> np.uint64:
    """As `_look`, of one part of one dimension, where only the element differs from change to change.

    In two loops, for in one that does nothing else many waits for memory overlap.
    """
    _fetch(row, element, new)
    return _move(row, element, ulps, new, inner)


@kernel
def _fetch(row: Rows, element: Elements, bits: Ulps) -> None:
    memory, stride = _pointer(row[ADDRESS]), row[TARGET + DIMS - 1]
    for j in range(element.size):
        bits[j] = np.int16(memory[np.int64(element[j]) * stride])


@kernel
def _move(row: Rows, element: Elements, ulps: Ulps, bits: Ulps, inner: Any) -> np.uint64:
    """Add `ulps` to `bits`; returns by how much the digest moves."""
    base, seed, step = np.uint64(row[FIRST]), np.uint64(row[SEED]), np.uint64(row[SOURCE + DIMS - 1])
    total, block, factor = np.uint64(0), _NO_BLOCK, np.uint64(0)
    for j in range(element.size):
        old = np.uint16(bits[j])
        value = np.uint16(old + np.uint16(ulps[j]))
        bits[j] = np.int16(value)
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
    """As `_look`, of one part that may have several dimensions or be of consecutive elements."""
    memory, seed = _pointer(row[ADDRESS]), np.uint64(row[SEED])
    total, block, factor = np.uint64(0), _NO_BLOCK, np.uint64(0)
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        old = memory[_at(row, TARGET, number)]
        value = np.uint16(old + np.uint16(ulps[j]))
        new[j] = np.int16(value)
        i = np.uint64(row[FIRST] + _at(row, SOURCE, number))
        if i // np.uint64(BLOCK) != block:  # near positions stay in a block for a while
            block = i // np.uint64(BLOCK)
            factor = outer(seed, block)
        total += factor * np.uint64(inner[i % np.uint64(BLOCK)]) * (np.uint64(value) - np.uint64(old))
    return total


@kernel
def _put(rows: Rows, parts: Rows, element: Elements, values: Ulps) -> int:
    """Write, and read back; returns how many elements are not what was written."""
    wrong = 0
    for p in range(parts.shape[0]):
        row, first, last, start = rows[parts[p, 0]], parts[p, 1], parts[p, 1] + parts[p, 2], parts[p, 3]
        memory, stride = _pointer(row[ADDRESS]), row[TARGET + DIMS - 1]
        if start >= 0 or row[SIZES + DIMS - 2] != 1:
            wrong += _put_any(row, first, last, start, element, values)
            continue
        for near in range(first, last, _NEAR):  # in stretches, so that what was written is still near
            upto = min(near + _NEAR, last)
            for j in range(near, upto):
                memory[np.int64(element[j]) * stride] = np.uint16(values[j])
            for j in range(near, upto):
                wrong += memory[np.int64(element[j]) * stride] != np.uint16(values[j])
    return wrong


@kernel
def _put_any(row: Rows, first: int, last: int, start: int, element: Elements, values: Ulps) -> int:
    """As `_put`, of one part that may have several dimensions or be of consecutive elements."""
    wrong, memory = 0, _pointer(row[ADDRESS])
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        memory[_at(row, TARGET, number)] = np.uint16(values[j])
    for j in range(first, last):
        number = start + j - first if start >= 0 else np.int64(element[j])
        wrong += memory[_at(row, TARGET, number)] != np.uint16(values[j])
    return wrong
