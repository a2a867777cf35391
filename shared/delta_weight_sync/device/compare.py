"""Kernels of the trainer's diff: one program per tile, the tiles of all tensors in one launch.

A tile is a block of the digest, 4096 elements of one tensor, or what the trainer has of it. Memory is read at
absolute addresses, so a mirror in pinned host memory is read over the bus while it is compared. `tiles.py`
builds the tables; `book` and `found` are what the host gets:

    book    int64 [2 + tiles]: changes in all, movement of the digest, and per tile `place * 8192 + count`
    found   int32 [capacity]: `position within the tile << 16 | ulps`, each tile's in order from its place on
"""

from __future__ import annotations

import triton
import triton.language as tl

from delta_weight_sync import digest
from delta_weight_sync.device import unpack
from delta_weight_sync.device.factors import outer

TILE = tl.constexpr(digest.BLOCK)
COLUMNS = tl.constexpr(6)  # of an entry: parameter, mirror, start, stop, seed, first tile
TOTALS = tl.constexpr(2)  # at the head of the book
COUNTS = tl.constexpr(unpack.COUNTS)


@triton.jit
def _bf16(values: tl.tensor, nan: tl.tensor) -> tl.tensor:
    """Bits of float32 `values` rounded to nearest even, as torch casts; `nan` stands for every NaN."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded)


@triton.jit
def _read(
    base: tl.tensor, first: tl.tensor, inside: tl.tensor, kind: tl.constexpr, whole: tl.constexpr
) -> tl.tensor:
    """A tile from absolute address `base` of element 0; zeros outside. `whole`: it is full and aligned."""
    memory = base.to(tl.pointer_type(kind)) + first
    if whole:
        values = tl.load(tl.multiple_of(memory, 16) + tl.arange(0, TILE))
    else:
        values = tl.load(memory + tl.arange(0, TILE), mask=inside, other=0)
    return values


@triton.jit(do_not_specialize=["capacity"])
def find(
    entries: tl.tensor,
    owners: tl.tensor,
    which: tl.tensor,
    factors: tl.tensor,
    nans: tl.tensor,
    book: tl.tensor,
    found: tl.tensor,
    capacity: tl.tensor,
    kind: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    """What differs from the mirror in the tiles `which`; of more than `capacity` changes, only how many.

    `kind`: the parameters' type, int16 for bf16. `nans`: int16 [1], what torch makes of a NaN of that type.
    """
    tile = tl.load(which + tl.program_id(0))
    entry = entries + tl.load(owners + tile).to(tl.int64) * COLUMNS
    start, stop = tl.load(entry + 2), tl.load(entry + 3)
    block = start // TILE + (tile - tl.load(entry + 5))
    first, lane = block * TILE, tl.arange(0, TILE)
    inside = (lane >= start - first) & (lane < stop - first)
    new = _read(tl.load(entry), first, inside, kind, whole)
    if kind != tl.int16:
        new = _bf16(new.to(tl.float32), tl.load(nans).to(tl.int32))
    new = new.to(tl.int32) & 0xFFFF
    old = _read(tl.load(entry + 1), first, inside, tl.int16, whole).to(tl.int32) & 0xFFFF
    changed = new != old
    count = tl.sum(changed.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(book, count.to(tl.int64), sem="relaxed")
        tl.store(book + TOTALS + tile, place * COUNTS + count)
        at = place + tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(found + at, (lane << 16) | ((new - old) & 0xFFFF), mask=changed & (at < capacity))
        factor = tl.load(factors + lane).to(tl.uint32, bitcast=True).to(tl.uint64)
        moved = tl.sum(factor * (new.to(tl.uint64) - old.to(tl.uint64)), 0)
        moved *= outer(tl.load(entry + 4).to(tl.uint64), block)
        tl.atomic_add(book + 1, moved.to(tl.int64), sem="relaxed")


@triton.jit
def keep(entries: tl.tensor, owners: tl.tensor, book: tl.tensor, found: tl.tensor) -> None:
    """Write what was found into the mirror, of which each tile is one program's."""
    tile = tl.program_id(0)
    note = tl.load(book + TOTALS + tile)
    lane = tl.arange(0, TILE)
    there = lane < note % COUNTS
    change = tl.load(found + note // COUNTS + lane, mask=there, other=0)
    entry = entries + tl.load(owners + tile).to(tl.int64) * COLUMNS
    block = tl.load(entry + 2) // TILE + (tile - tl.load(entry + 5))
    memory = tl.load(entry + 1).to(tl.pointer_type(tl.int16)) + block * TILE + (change >> 16)
    old = tl.load(memory, mask=there, other=0)
    tl.store(memory, (old.to(tl.int32) + change).to(tl.int16), mask=there)


@triton.jit(do_not_specialize=["count"])
def add(addresses: tl.tensor, ulps: tl.tensor, old: tl.tensor, count: tl.tensor) -> None:
    """Add `ulps` to the bits at absolute addresses, all different; `old` gets what stood there."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    memory = tl.load(addresses + at, mask=inside, other=0).to(tl.pointer_type(tl.int16))
    was = tl.load(memory, mask=inside, other=0)
    change = tl.load(ulps + at, mask=inside, other=0)
    tl.store(old + at, was, mask=inside)
    tl.store(memory, (was.to(tl.int32) + change).to(tl.int16), mask=inside)
