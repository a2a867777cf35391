"""One launch over a whole model: its digest, a reading of it, a commit. In Triton.

The same arithmetic as `host_memory`, on the same table (`table.py`). Every kernel takes absolute addresses
from it, so that it reaches all parameters; and every program takes one block of a list, so that the number of
launches depends on nothing. Sums wrap at 2^64 and come together in a few cells, whose order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from delta_weight_sync.device.factors import outer
from delta_weight_sync.vllm import table as columns

BLOCK: tl.constexpr = tl.constexpr(1024)  # changes of a program
TILE: tl.constexpr = tl.constexpr(4096)  # elements of a program that hashes or reads
CELLS: tl.constexpr = tl.constexpr(256)  # over which programs spread their sums
COLUMNS: tl.constexpr = tl.constexpr(columns.COLUMNS)
DIMS: tl.constexpr = tl.constexpr(columns.DIMS)
ADDRESS: tl.constexpr = tl.constexpr(columns.ADDRESS)
SEED: tl.constexpr = tl.constexpr(columns.SEED)
COUNTED: tl.constexpr = tl.constexpr(columns.COUNTED)
FIRST: tl.constexpr = tl.constexpr(columns.FIRST)
SIZES: tl.constexpr = tl.constexpr(columns.SIZES)
SOURCE: tl.constexpr = tl.constexpr(columns.SOURCE)
TARGET: tl.constexpr = tl.constexpr(columns.TARGET)


@triton.jit
def _at(row: tl.tensor, strides: tl.constexpr, element: tl.tensor) -> tl.tensor:
    """Positions (`strides`: SOURCE) or places (TARGET) of elements, int32, from the row's first: int64."""
    rest = element
    at = element.to(tl.int64) * 0
    for back in tl.static_range(1, DIMS + 1):  # the last dimension first
        size = tl.load(row + (SIZES + DIMS - back)).to(tl.int32)
        at += (rest % size).to(tl.int64) * tl.load(row + (strides + DIMS - back))
        rest = rest // size
    return at


@triton.jit
def _memory(row: tl.tensor) -> tl.tensor:
    return tl.load(row + ADDRESS).to(tl.pointer_type(tl.int16))


@triton.jit
def _unsigned(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.uint16, bitcast=True).to(tl.uint64)


@triton.jit
def _add(cells: tl.tensor, program: tl.tensor, amount: tl.tensor) -> None:
    tl.atomic_add(cells + program % CELLS, amount.to(tl.int64, bitcast=True))


@triton.jit
def digest_whole(rows: tl.tensor, tiles: tl.tensor, inner: tl.tensor, cells: tl.tensor) -> None:
    """As `digest`, of tiles that are a whole block of it, consecutive in memory, and aligned to 16 bytes."""
    program = tl.program_id(0)
    tile = tiles + 3 * program.to(tl.int64)
    row, first = rows + tl.load(tile) * COLUMNS, tl.load(tile + 1)
    lane = tl.arange(0, TILE)
    bits = tl.load(tl.multiple_of(_memory(row) + first, 16) + lane)
    factor = tl.load(inner + lane).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
    block = (tl.load(row + FIRST) + first) // 4096
    _add(cells, program, outer(seed, block) * tl.sum(factor * _unsigned(bits), 0))


@triton.jit
def digest(
    rows: tl.tensor,
    tiles: tl.tensor,
    inner: tl.tensor,
    cells: tl.tensor,
    run: tl.constexpr,
) -> None:
    """Add the digest of live elements to `cells`, int64 [CELLS].

    `tiles`: int64 [p, 3], of a row the first element and how many, at most TILE. Every `run` elements from
    the first are consecutive in the checkpoint tensor and in one block of the digest, and share its factor.
    """
    program = tl.program_id(0)
    tile = tiles + 3 * program.to(tl.int64)
    row = rows + tl.load(tile) * COLUMNS
    first, count = tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32)
    number = tl.arange(0, TILE // run)[:, None] * run + tl.arange(0, run)[None, :]
    start = first + tl.arange(0, TILE // run) * run
    stride = tl.load(row + TARGET + DIMS - 1)
    places = _at(row, TARGET, start)[:, None] + tl.arange(0, run)[None, :] * stride
    inside = number < count
    bits = tl.load(_memory(row) + places, mask=inside, other=0)
    position = tl.load(row + FIRST) + _at(row, SOURCE, start)
    within = (position % 4096).to(tl.int32)[:, None] + tl.arange(0, run)[None, :]
    factor = tl.load(inner + within, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    sums = tl.sum(factor * _unsigned(bits), 1)
    seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
    _add(cells, program, tl.sum(outer(seed, position // 4096) * sums, 0))


@triton.jit
def read(rows: tl.tensor, tiles: tl.tensor, out: tl.tensor) -> None:
    """Copy live bits to `out`, int16 [n].

    `tiles`: int64 [p, 4], of a row the first element, how many, at most TILE, and where to in `out`.
    """
    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    row = rows + tl.load(tile) * COLUMNS
    number = tl.arange(0, TILE)
    inside = number < tl.load(tile + 2).to(tl.int32)
    bits = tl.load(
        _memory(row) + _at(row, TARGET, tl.load(tile + 1).to(tl.int32) + number), mask=inside, other=0
    )
    tl.store(out + tl.load(tile + 3) + number, bits, mask=inside)


@triton.jit
def _changed(block: tl.tensor, element: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """The numbers of a block's changed elements, int32; where it has none, some number of its row."""
    first, count, start = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    listed = tl.load(element + first + lane, mask=lane < tl.where(start < 0, count, 0), other=0)
    counted = tl.where(lane < tl.where(start < 0, 0, count), start + lane, 0)
    return listed + counted.to(tl.int32)


@triton.jit
def look(
    rows: tl.tensor,
    blocks: tl.tensor,
    element: tl.tensor,
    ulps: tl.tensor,
    new: tl.tensor,
    inner: tl.tensor,
    cells: tl.tensor,
) -> None:
    """Fill `new` with the bits that changes lead to, and add to `cells` by how much they move the digest.

    `blocks`: int64 [b, 4] as `Changes.blocks`; `element` int32 [m], `ulps` and `new` int16 [n].
    """
    program = tl.program_id(0)
    block = blocks + 4 * program.to(tl.int64)
    row, first = rows + tl.load(block) * COLUMNS, tl.load(block + 1)
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(block + 2)
    number = _changed(block, element, lane)
    old = tl.load(_memory(row) + _at(row, TARGET, number), mask=inside, other=0)
    value = old + tl.load(ulps + first + lane, mask=inside, other=0)
    tl.store(new + first + lane, value, mask=inside)
    position = tl.load(row + FIRST) + _at(row, SOURCE, number)
    factor = tl.load(inner + (position % 4096)).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
    moved = tl.sum(outer(seed, position // 4096) * factor * (_unsigned(value) - _unsigned(old)), 0)
    _add(cells, program, moved * tl.load(row + COUNTED).to(tl.uint64))


@triton.jit
def put(
    rows: tl.tensor,
    blocks: tl.tensor,
    element: tl.tensor,
    ulps: tl.tensor,
    new: tl.tensor,
    undo: tl.constexpr,
) -> None:
    """Write the new bits, or with `undo` the old ones, which are the new ones without what was added."""
    block = blocks + 4 * tl.program_id(0).to(tl.int64)
    row, first = rows + tl.load(block) * COLUMNS, tl.load(block + 1)
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(block + 2)
    bits = tl.load(new + first + lane, mask=inside, other=0)
    if undo:
        bits = bits - tl.load(ulps + first + lane, mask=inside, other=0)
    tl.store(_memory(row) + _at(row, TARGET, _changed(block, element, lane)), bits, mask=inside)


@triton.jit
def check(
    rows: tl.tensor,
    blocks: tl.tensor,
    element: tl.tensor,
    new: tl.tensor,
    wrong: tl.tensor,
) -> None:
    """Add to `wrong`, int64 [1], how many elements are not the new bits."""
    block = blocks + 4 * tl.program_id(0).to(tl.int64)
    row, first = rows + tl.load(block) * COLUMNS, tl.load(block + 1)
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(block + 2)
    place = _memory(row) + _at(row, TARGET, _changed(block, element, lane))
    there = tl.load(place, mask=inside, other=0)
    missed = tl.sum((there != tl.load(new + first + lane, mask=inside, other=0)).to(tl.int64), 0)
    if missed != 0:
        tl.atomic_add(wrong, missed)
