"""Finds the changes of all parameters on one GPU, in a few launches. The host waits at most three times.

A rank may hold several contiguous stretches of a parameter. A tile is the part of a digest block (4096
elements) that lies in one of these stretches. Each program of the kernels `find` and `keep` handles one tile.
A mirror is a bf16 copy of a parameter as of the last sync. Kernels get addresses, so a mirror may also be in
pinned host memory, which the GPU reads over the bus. `find` writes two tables:

    book    int64 [66 + tiles]. [0]: number of changes. [1]: number of changes to NaN or infinity. [2:66]:
            64 numbers whose sum is the change of the digest. [66 + tile]: `place * 8192 + count`; the tile's
            `count` changes begin at `found[place]`.
    found   int32 [capacity]: `position in the digest block << 16 | ulps`, in ascending order within each tile
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.digest import BLOCK, change_digest, seed
from delta_weight_sync.gpu import inner, launch, outer, read
from delta_weight_sync.publish.mirror import Part
from delta_weight_sync.util import in_parts, kernel

COUNTS = 8192  # the factor of `place` in `book`; a tile has fewer changes
TILE = tl.constexpr(BLOCK)
COLUMNS = tl.constexpr(6)  # of `entries`: the five that `_entries` describes, then the first tile's number
_CELLS = tl.constexpr(64)  # cells of `book` for the digest: many, so that atomic additions rarely collide
TOTALS = tl.constexpr(2 + _CELLS.value)  # cells of `book` before those of the tiles
_COUNTS = tl.constexpr(COUNTS)
KINDS = {torch.bfloat16: tl.int16, torch.float32: tl.float32, torch.float16: tl.float16}
_ALIGNED = 16  # bytes that a thread can read in one load, if they are aligned
_ROOM = 64  # `found` has room for at least this many changes per tile, on average (1.6 %)
Mirrors = Mapping[str, torch.Tensor]  # int16, in memory that the device can read
Key = list[tuple[object, ...]]


@triton.jit
def _bf16(values: tl.tensor, nan: tl.tensor) -> tl.tensor:
    """Round float32 `values` to the nearest bf16, ties to even, as torch does. Every NaN becomes `nan`."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded)


@triton.jit
def _read(
    base: tl.tensor, first: tl.tensor, inside: tl.tensor, kind: tl.constexpr, whole: tl.constexpr
) -> tl.tensor:
    """Read a digest block that begins at element `first`. Lanes that are not `inside` the tile are 0.
    `base`: address of the parameter's element 0. `whole`: the tile is a whole block, and aligned."""
    memory = base.to(tl.pointer_type(kind)) + first
    if whole:
        values = tl.load(tl.multiple_of(memory, 16) + tl.arange(0, TILE))
    else:
        values = tl.load(memory + tl.arange(0, TILE), mask=inside, other=0)
    return values


@triton.jit(do_not_specialize=["capacity"])
def find(
    entries: tl.tensor,
    row_of: tl.tensor,
    which: tl.tensor,
    factors: tl.tensor,
    nans: tl.tensor,
    book: tl.tensor,
    found: tl.tensor,
    capacity: tl.tensor,
    kind: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    """Compare the tiles `which` with the mirror. Changes for which `found` has no room are only counted.
    `kind`: the parameters' type, int16 for bf16. `nans`: int16 [1], the bits of a NaN that torch has cast."""
    tile = tl.load(which + tl.program_id(0))
    entry = entries + tl.load(row_of + tile).to(tl.int64) * COLUMNS
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
        tl.store(book + TOTALS + tile, place * _COUNTS + count)
        at = place + tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(found + at, (lane << 16) | ((new - old) & 0xFFFF), mask=changed & (at < capacity))
        factor = tl.load(factors + lane).to(tl.uint32, bitcast=True).to(tl.uint64)
        moved = tl.sum(factor * (new.to(tl.uint64) - old.to(tl.uint64)), 0)
        moved *= outer(tl.load(entry + 4).to(tl.uint64), block)
        tl.atomic_add(book + 2 + tile % _CELLS, moved.to(tl.int64), sem="relaxed")
        infinite = tl.sum((changed & ((new & 0x7F80) == 0x7F80)).to(tl.int64), 0)
        if infinite > 0:
            tl.atomic_add(book + 1, infinite, sem="relaxed")


@triton.jit
def keep(entries: tl.tensor, row_of: tl.tensor, book: tl.tensor, found: tl.tensor) -> None:
    """Write the changes in `found` into the mirror. Each program handles one tile."""
    tile = tl.program_id(0)
    note = tl.load(book + TOTALS + tile)
    lane = tl.arange(0, TILE)
    there = lane < note % _COUNTS
    change = tl.load(found + note // _COUNTS + lane, mask=there, other=0)
    entry = entries + tl.load(row_of + tile).to(tl.int64) * COLUMNS
    block = tl.load(entry + 2) // TILE + (tile - tl.load(entry + 5))
    memory = tl.load(entry + 1).to(tl.pointer_type(tl.int16)) + block * TILE + (change >> 16)
    old = tl.load(memory, mask=there, other=0)
    # The cast to int16 drops the upper half of `change`, which is the position.
    tl.store(memory, (old.to(tl.int32) + change).to(tl.int16), mask=there)


@triton.jit(do_not_specialize=["count"])
def add(addresses: tl.tensor, ulps: tl.tensor, old: tl.tensor, count: tl.tensor) -> None:
    """Add `ulps` to the bits at `addresses` (absolute, distinct). Write the earlier bits to `old`."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    memory = tl.load(addresses + at, mask=inside, other=0).to(tl.pointer_type(tl.int16))
    was = tl.load(memory, mask=inside, other=0)
    change = tl.load(ulps + at, mask=inside, other=0)
    tl.store(old + at, was, mask=inside)
    tl.store(memory, (was.to(tl.int32) + change).to(tl.int16), mask=inside)


@kernel
def unpack(notes: Index, found: NDArray[np.int32], blocks: Index, index: Index, ulps: Bits) -> None:
    """Fill `index` and `ulps` with the changes of all tiles, tile by tile. `notes`, int64 [tiles]: `book`
    without its totals. `blocks`, int64 [tiles]: the number of each tile's digest block in its tensor."""
    at = 0
    for tile in range(notes.size):
        place, count = notes[tile] // COUNTS, notes[tile] % COUNTS
        part = found[place : place + count]
        _unpack_tile(part, blocks[tile] * BLOCK, index[at : at + count], ulps[at : at + count])
        at += count


@kernel
def _unpack_tile(found: NDArray[np.int32], first: int, index: Index, ulps: Bits) -> None:
    # This is a separate function, so that the loop indexes slices from 0: LLVM vectorizes such a loop.
    for j in range(found.size):
        index[j] = first + (found[j] >> 16)
        ulps[j] = found[j] & 0xFFFF


class _Tiles:
    """The tiles of all tensors that are compared together on one device: the kernels' input, and what the
    host needs to read their output.

    `key`: identifies the tensors and their addresses. `count`: number of tiles. `row_of`, int32 [count]: the
    row of each tile in `entries`. `blocks`, int64 [count]: as in `unpack`. `ends`, int64 [tensors]: index
    after each tensor's last tile. `room`: capacity of `found`.
    """

    def __init__(self, key: Key, parts: Sequence[Part], mirrors: Mirrors, device: torch.device) -> None:
        rows = [_entries(part, mirrors[part.name]) for part in parts]
        table = np.concatenate(rows)
        start, stop = table[:, 2], table[:, 3]
        tiles = np.where(stop > start, -(-stop // BLOCK) - start // BLOCK, 0)
        first = np.cumsum(tiles) - tiles
        row_of = np.repeat(np.arange(len(table), dtype=np.int32), tiles)
        self.key, self.device, self.count = key, device, row_of.size
        self.blocks: Index = (start // BLOCK - first)[row_of] + np.arange(self.count)
        of_tensor = np.repeat(np.arange(len(parts)), [len(part) for part in rows])
        self.ends: Index = np.cumsum(np.bincount(of_tensor, tiles, len(parts)).astype(np.int64))
        self.entries = torch.from_numpy(np.column_stack([table, first])).to(device)
        self.row_of = torch.from_numpy(row_of).to(device)
        dtypes = np.array([list(KINDS).index(part.tensor.dtype) for part in parts], np.int64)
        position, aligned = self.blocks * BLOCK, (table[:, :2] % _ALIGNED == 0).all(1)[row_of]
        whole = aligned & (position >= start[row_of]) & (position + BLOCK <= stop[row_of])
        classes = dtypes[of_tensor][row_of] * 2 + whole
        # Each launch: the tensors' dtype, whether its tiles are full and aligned, the tiles' numbers (int32).
        self.launches = [
            (list(KINDS)[number // 2], number % 2 == 1, torch.from_numpy(which.astype(np.int32)).to(device))
            for number in np.unique(classes).tolist()
            for which in np.nonzero(classes == number)
        ]
        self.make_room(0)

    def make_room(self, changes: int) -> None:
        """Make room for a quarter more than `changes`, the number that the last comparison found."""
        self.room = max(self.count * _ROOM, int(changes) * 5 // 4)


def _entries(part: Part, mirror: torch.Tensor) -> Index:
    """Return five columns of `entries`, int64 [n, 5]: addresses of element 0 in parameter and mirror, start,
    stop, seed.

    There is one row for each contiguous stretch of the parameter that this rank holds. The mirror holds the
    whole parameter; the part's tensor holds only these stretches, one after the other.
    """
    starts, length = part.block.stretches()
    # Stretch k begins at element `length * k` of the tensor. The parameter's element 0 would be `starts[k]`
    # elements earlier. This address may be outside of the tensor, but kernels read only from `start` on.
    before = length * np.arange(len(starts)) - starts
    rows = np.empty((len(starts), 5), np.int64)
    rows[:, 0] = part.tensor.data_ptr() + before * part.tensor.element_size()
    rows[:, 1] = mirror.data_ptr()
    rows[:, 2], rows[:, 3] = starts, starts + length
    rows[:, 4] = seed(part.name).astype(np.int64)
    return rows


@dataclass(frozen=True)
class Changes:
    """The differences from the mirrors: one patch per part."""

    patches: list[Patch]
    infinite: int  # number of changes to NaN or infinity
    moved: int  # change of the digest
    tiles: _Tiles
    book: torch.Tensor  # `book` and `found` are on the device, for `DeviceDiff.keep`
    found: torch.Tensor


class DeviceDiff:
    """Compares parameters on one device with their mirrors; updates the mirrors on the trainer's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # `read` uses a stream that waits for the last write to mirrors, but not for training's later work.
        self._reads = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None
        self._tables: dict[str, _Tiles] = {}  # first tensor of a comparison -> table of all its tensors

    def find(self, parts: Sequence[Part], mirrors: Mirrors) -> Changes:
        """Find the changes of parts of any float dtype and layout. Leave the mirrors unchanged."""
        readable = [_readable(part) for part in parts]  # keeps copies alive until they are compared
        with torch.accelerator.device_index(self._device.index):
            tiles = self._table(readable, mirrors)
            book, found, cells = self._compare(tiles)
            if cells[0] > found.numel():
                tiles.make_room(cells[0])
                book, found, cells = self._compare(tiles)
            tiles.make_room(cells[0])
            packed = read(found[: cells[0]]).numpy()
        index, ulps = np.empty(cells[0], np.int64), np.empty(cells[0], np.uint16)
        notes = cells[TOTALS.value :]
        upto = np.concatenate([[0], np.cumsum(notes % COUNTS)])

        def fill(some: slice) -> None:
            its = slice(upto[some.start], upto[some.stop])
            unpack(notes[some], packed, tiles.blocks[some], index[its], ulps[its])

        in_parts(fill, tiles.count, 1)
        ends = upto[np.concatenate([[0], tiles.ends])].tolist()
        patches = [
            Patch(part.name, part.block.shape, index[a:b], ulps[a:b])
            for part, (a, b) in zip(parts, itertools.pairwise(ends), strict=True)
        ]
        return Changes(patches, int(cells[1]), int(cells[2 : TOTALS.value].sum()), tiles, book, found)

    def keep(self, changes: Changes) -> None:
        """Write the changes into mirrors in device memory, without waiting for the device."""
        tiles = changes.tiles
        with torch.accelerator.device_index(self._device.index):
            launch(keep, tiles.count, tiles.entries, tiles.row_of, changes.book, changes.found)
        if self._reads:
            self._written = torch.cuda.current_stream(self._device).record_event()

    def read(self, mirror: torch.Tensor) -> torch.Tensor:
        """Return a copy of a mirror on the host."""
        with torch.cuda.stream(self._reads):
            if self._reads and self._written:
                self._reads.wait_event(self._written)
            return read(mirror)

    def take(self, patches: Sequence[Patch], mirrors: Mirrors) -> int:
        """Apply other ranks' patches to mirrors on the device; return the change of the digest."""
        index = np.concatenate([mirrors[p.name].data_ptr() + 2 * p.index for p in patches])
        ulps = np.concatenate([p.ulps for p in patches])
        with torch.accelerator.device_index(self._device.index):
            there = torch.from_numpy(ulps.view(np.int16)).to(self._device)
            old = torch.empty_like(there)
            addresses = torch.from_numpy(index).to(self._device)
            launch(add, -(-index.size // BLOCK), addresses, there, old, index.size)
            was = read(old).numpy().view(np.uint16)
        parts = np.split(was, np.cumsum([p.index.size for p in patches])[:-1])
        pairs = zip(patches, parts, strict=True)
        return sum(change_digest(p.name, p.index, bits, bits + p.ulps) for p, bits in pairs)

    def _table(self, parts: Sequence[Part], mirrors: Mirrors) -> _Tiles:
        """Return the last sync's table. Make a new table if an address, a block or a dtype has changed."""
        key: Key = [
            (p.name, p.block, p.tensor.dtype, p.tensor.data_ptr(), mirrors[p.name].data_ptr()) for p in parts
        ]
        table = self._tables.get(parts[0].name)
        if table is None or table.key != key:
            table = self._tables[parts[0].name] = _Tiles(key, parts, mirrors, self._device)
        return table

    def _compare(self, tiles: _Tiles) -> tuple[torch.Tensor, torch.Tensor, Index]:
        """Return `book` and `found` on the device, and the cells of `book` on the host."""
        book = torch.zeros(TOTALS.value + tiles.count, dtype=torch.int64, device=self._device)
        found = torch.empty(tiles.room, dtype=torch.int32, device=self._device)
        for dtype, whole, which in tiles.launches:
            given = tiles.entries, tiles.row_of, which, inner(self._device), _nan(dtype, self._device)
            launch(find, which.numel(), *given, book, found, tiles.room, kind=KINDS[dtype], whole=whole)
        return book, found, read(book).numpy()


def _readable(part: Part) -> Part:
    """Return the part itself if kernels can read it, else a part with a contiguous bf16 copy."""
    if part.tensor.dtype in KINDS and part.tensor.is_contiguous():
        return part
    return part._replace(tensor=part.tensor.to(torch.bfloat16).contiguous())


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return int16 [1]: the bf16 bits to which torch casts a NaN of `dtype` on `device`."""
    bits = to_bits(torch.full((1,), torch.nan, dtype=dtype, device=device))
    return torch.from_numpy(bits.view(np.int16)).to(device)
