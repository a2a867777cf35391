"""Does on a GPU, in Triton, what `vllm/memory.py` does on the host: the same arithmetic on the same table.

Each row of the table has the address of a piece of a parameter. So one launch reaches all parameters.
The work of a launch is a list: of tiles to hash or read, or of blocks of changes. Each Triton program does a
part of it. So hashing, reading or committing takes a few launches and one or two waits, however many tensors
the model has. Sums wrap at 2^64 and are spread over a few cells, which may be added in any order.

Staging (the preparation of a commit) has its own stream, so that staging and vLLM do not wait for each other.
A commit runs on vLLM's stream, between two steps. Staged data is on the device if it takes at most half of
the free memory there. Otherwise it stays in pinned host memory, which kernels read over the bus. That is
slower, but leaves the device's memory to the engine.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits
from delta_weight_sync.codec._patch import cut
from delta_weight_sync.gpu import free_bytes, inner, launch, outer, read
from delta_weight_sync.vllm import memory

BLOCK = 1024  # changes that a program takes
TILE = 4096  # elements that `digest_whole` and `read_kernel` take at a time; the block size of the digest
PIECE = 1024  # elements that a program of `digest` hashes; more would not fit into the registers
CELLS = 256  # cells over which programs spread their sums
WARPS = 16  # warps of a program that hashes many tiles; each thread reads 16 bytes of a tile
_BLOCK, _TILE, _PIECE, _CELLS = map(tl.constexpr, (BLOCK, TILE, PIECE, CELLS))
_COLUMNS, _DIMS, _ADDRESS = map(tl.constexpr, (memory.COLUMNS, memory.DIMS, memory.ADDRESS))
_SEED, _COUNTED, _FIRST = map(tl.constexpr, (memory.SEED, memory.COUNTED, memory.FIRST))
_SIZES, _SOURCE, _TARGET = map(tl.constexpr, (memory.SIZES, memory.SOURCE, memory.TARGET))


@triton.jit
def _at(row: tl.tensor, strides: tl.constexpr, element: tl.tensor) -> tl.tensor:
    """Distances (int64) of elements from the first element of the piece that a row of the table describes.
    `strides`: SOURCE for distances in the checkpoint's tensor, TARGET for distances in memory."""
    rest = element
    at = element.to(tl.int64) * 0
    for back in tl.static_range(1, _DIMS + 1):  # the last dimension first
        size = tl.load(row + (_SIZES + _DIMS - back)).to(tl.int32)
        at += (rest % size).to(tl.int64) * tl.load(row + (strides + _DIMS - back))
        rest = rest // size
    return at


@triton.jit
def _memory(row: tl.tensor) -> tl.tensor:
    return tl.load(row + _ADDRESS).to(tl.pointer_type(tl.int16))


@triton.jit
def _unsigned(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.uint16, bitcast=True).to(tl.uint64)


@triton.jit
def _add(cells: tl.tensor, program: tl.tensor, amount: tl.tensor) -> None:
    tl.atomic_add(cells + program % _CELLS, amount.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["count"])
def digest_whole(
    rows: tl.tensor, tiles: tl.tensor, inner: tl.tensor, cells: tl.tensor, count: tl.tensor
) -> None:
    """Like `digest` below, for tiles that are whole, contiguous blocks of the digest, aligned to 16 bytes.

    Each program takes an equal, consecutive share of the `count` tiles. A lane has the same inner factor in
    each tile, so the program sums each lane, and at the end multiplies each sum by the lane's factor.
    """
    program, lane = tl.program_id(0).to(tl.int64), tl.arange(0, _TILE)
    sums = tl.zeros([_TILE], tl.uint64)
    first_tile, programs = program * count // tl.num_programs(0), tl.num_programs(0)
    for number in tl.range(first_tile, (program + 1) * count // programs, loop_unroll_factor=4):
        row, first = rows + tl.load(tiles + 3 * number) * _COLUMNS, tl.load(tiles + 3 * number + 1)
        bits = tl.load(tl.multiple_of(_memory(row) + first, 16) + lane)
        seed = tl.load(row + _SEED).to(tl.uint64, bitcast=True)
        sums += outer(seed, (tl.load(row + _FIRST) + first) // _TILE) * _unsigned(bits)
    factor = tl.load(inner + lane).to(tl.uint32, bitcast=True).to(tl.uint64)
    _add(cells, program, tl.sum(factor * sums, 0))


@triton.jit
def digest(rows: tl.tensor, tiles: tl.tensor, inner: tl.tensor, cells: tl.tensor) -> None:
    """Add the digest of live elements to `cells`, int64 [CELLS].

    `tiles` is int64 [p, 3]: row, first element, number of elements (at most PIECE).
    """
    program, lane = tl.program_id(0), tl.arange(0, _PIECE)
    tile = tiles + 3 * program.to(tl.int64)
    row, element = rows + tl.load(tile) * _COLUMNS, tl.load(tile + 1).to(tl.int32) + lane
    inside = lane < tl.load(tile + 2).to(tl.int32)
    bits = tl.load(_memory(row) + _at(row, _TARGET, element), mask=inside, other=0)
    position = tl.load(row + _FIRST) + _at(row, _SOURCE, element)
    factor = tl.load(inner + (position % 4096)).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = tl.load(row + _SEED).to(tl.uint64, bitcast=True)
    _add(cells, program, tl.sum(outer(seed, position // 4096) * factor * _unsigned(bits), 0))


@triton.jit
def read_kernel(rows: tl.tensor, tiles: tl.tensor, out: tl.tensor) -> None:
    """Copy live bits to `out`, int16 [n]. `tiles`, int64 [p, 4]: row, element, count, and place in `out`."""
    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    row, lane = rows + tl.load(tile) * _COLUMNS, tl.arange(0, _TILE)
    inside = lane < tl.load(tile + 2).to(tl.int32)
    place = _memory(row) + _at(row, _TARGET, tl.load(tile + 1).to(tl.int32) + lane)
    tl.store(out + tl.load(tile + 3) + lane, tl.load(place, mask=inside, other=0), mask=inside)


@triton.jit
def _block(rows: tl.tensor, blocks: tl.tensor, element: tl.tensor) -> tl.tensor:
    """Return this program's row, and for each lane: index of a change, whether it exists, its element.
    `blocks`: int64 [b, 3] from `Changes.blocks`; `element`: int32 [n]."""
    block, lane = blocks + 3 * tl.program_id(0).to(tl.int64), tl.arange(0, _BLOCK)
    at, inside = tl.load(block + 1) + lane, lane < tl.load(block + 2)
    return rows + tl.load(block) * _COLUMNS, at, inside, tl.load(element + at, mask=inside, other=0)


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
    """Fill `new` with the bits after the changes, and add the change of the digest to `cells`."""
    row, at, inside, number = _block(rows, blocks, element)
    old = tl.load(_memory(row) + _at(row, _TARGET, number), mask=inside, other=0)
    value = old + tl.load(ulps + at, mask=inside, other=0)
    tl.store(new + at, value, mask=inside)
    position = tl.load(row + _FIRST) + _at(row, _SOURCE, number)
    factor = tl.load(inner + (position % 4096)).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = tl.load(row + _SEED).to(tl.uint64, bitcast=True)
    moved = tl.sum(outer(seed, position // 4096) * factor * (_unsigned(value) - _unsigned(old)), 0)
    _add(cells, tl.program_id(0), moved * tl.load(row + _COUNTED).to(tl.uint64))


@triton.jit
def put(
    rows: tl.tensor,
    blocks: tl.tensor,
    element: tl.tensor,
    ulps: tl.tensor,
    new: tl.tensor,
    undo: tl.constexpr,
) -> None:
    """Write the new bits. With `undo`, write the old bits, which are the new bits minus `ulps`."""
    row, at, inside, number = _block(rows, blocks, element)
    bits = tl.load(new + at, mask=inside, other=0)
    if undo:
        bits = bits - tl.load(ulps + at, mask=inside, other=0)
    tl.store(_memory(row) + _at(row, _TARGET, number), bits, mask=inside)


@triton.jit
def check(rows: tl.tensor, blocks: tl.tensor, element: tl.tensor, new: tl.tensor, wrong: tl.tensor) -> None:
    """Add to `wrong`, int64 [1], the number of elements that do not have the new bits."""
    row, at, inside, number = _block(rows, blocks, element)
    there = tl.load(_memory(row) + _at(row, _TARGET, number), mask=inside, other=0)
    missed = tl.sum((there != tl.load(new + at, mask=inside, other=0)).to(tl.int64), 0)
    if missed != 0:
        tl.atomic_add(wrong, missed)


class DeviceMemory:
    """The parameters of a `Table` on a GPU.

    `programs`: at most this many multiprocessors hash whole tiles; the others are left to the engine.
    """

    def __init__(self, table: memory.Table) -> None:
        self._table, self._device = table, table.device
        self._stream, self.programs = None, 8
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            self.programs = max(1, torch.cuda.get_device_properties(self._device).multi_processor_count // 4)
        with self._staging():
            self._inner = inner(self._device)
            self._cells = torch.zeros(CELLS, dtype=torch.int64, device=self._device)
            (self._rows,) = self._upload([table.rows])
            self._whole, self._others = self._upload(_tiles(table))

    def digest(self) -> int:
        """This worker's share of the live parameters' digest, read from memory."""
        with self._staging():
            self._cells.zero_()
            count, sums = len(self._whole), (self._inner, self._cells)
            programs = min(count, self.programs)
            launch(digest_whole, programs, self._rows, self._whole, *sums, count, num_warps=WARPS)
            launch(digest, len(self._others), self._rows, self._others, *sums)
            return self._sum()

    known_digest = digest  # reading everything again is fast on a GPU

    def recheck(self) -> None:
        """Do nothing, because on a GPU `known_digest` hashes all live parameters again."""

    def read(self, parts: memory.Rows) -> Bits:
        """Read live bits. `parts` is int64 [p, 3]: row of the table, first element, number of elements."""
        tiles = cut(parts, TILE)
        tiles = np.column_stack([tiles, tiles[:, 2].cumsum() - tiles[:, 2]])
        with self._staging():
            out = self._pinned((int(parts[:, 2].sum()),), torch.int16)
            launch(read_kernel, len(tiles), self._rows, self._upload([tiles])[0], out)
            self._sum()
        return out.numpy().view(np.uint16)

    def prepare(self, changes: memory.Changes) -> tuple[memory.Step, int]:
        """Return a `Step` that writes the changes, and what they add to this worker's share of the digest."""
        arrays = (changes.blocks(BLOCK), changes.element, changes.ulps.view(np.int16))
        with self._staging():
            blocks, element, ulps = self._upload(arrays, also=changes.ulps.nbytes)
            there = ulps.device == self._device
            new = torch.empty_like(ulps) if there else self._pinned(ulps.shape, ulps.dtype)
            self._cells.zero_()
            changed = (self._rows, blocks, element, ulps, new)
            launch(look, len(blocks), *changed, self._inner, self._cells)
            wrong = torch.zeros(1, dtype=torch.int64, device=self._device)
            moved = self._sum()

        def do() -> tuple[int, float]:  # `do` and `undo` use the caller's stream
            started = time.perf_counter()
            read(wrong.zero_())  # waits for the engine's step
            waited_s = time.perf_counter() - started
            launch(put, len(blocks), *changed, undo=False)
            launch(check, len(blocks), self._rows, blocks, element, new, wrong)
            return int(read(wrong)), waited_s

        def undo() -> None:
            launch(put, len(blocks), *changed, undo=True)
            read(wrong)  # waits until the old bits are there

        return memory.Step(do, undo), moved

    def _sum(self) -> int:
        return int(read(self._cells.sum()))  # waits for the kernels

    def _upload(self, arrays: Sequence[NDArray[Any]], also: int = 0) -> list[torch.Tensor]:
        """Copy arrays to the device, or to pinned memory if they take over half of the device's free bytes.

        `also`: bytes that the caller allocates in the same place afterwards; they count, too.
        """
        fits = 2 * (sum(array.nbytes for array in arrays) + also) <= free_bytes(self._device)
        copies = []
        for array in arrays:
            copy = self._pinned(array.shape, torch.from_numpy(array[:0]).dtype)
            copy.numpy()[...] = array
            copies.append(copy.to(self._device, non_blocking=True) if fits else copy)
        return copies

    def _pinned(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, pin_memory=self._device.type == "cuda")

    @contextlib.contextmanager
    def _staging(self) -> Iterator[None]:
        """Run a block on this device and on the staging stream, in any thread."""
        with torch.no_grad(), torch.cuda.stream(self._stream):  # without a stream, this changes nothing
            yield


def _tiles(table: memory.Table) -> tuple[memory.Rows, memory.Rows]:
    """The tiles for `digest_whole`, and those for `digest`: together all elements that this worker hashes."""
    rows, tiles = table.rows, cut(table.parts[table.rows[:, memory.COUNTED] == 1], TILE)
    flat = (rows[:, memory.SIZES : memory.SOURCE - 1] == 1).all(1)
    contiguous = (rows[:, memory.TARGET - 1] == 1) & (rows[:, memory.COLUMNS - 1] == 1)  # last strides
    aligned = (rows[:, memory.FIRST] % TILE == 0) & (rows[:, memory.ADDRESS] % 16 == 0)
    whole = (flat & contiguous & aligned)[tiles[:, 0]] & (tiles[:, 2] == TILE)
    return tiles[whole], cut(tiles[~whole], PIECE)
