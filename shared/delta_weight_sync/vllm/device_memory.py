"""Hashing and writing parameters in a GPU's memory: a few launches and one wait, whatever the model.

Staging has a stream of its own, so that it queues behind nothing of vLLM's and vLLM behind nothing of it; a
commit runs on vLLM's stream, between two steps. What is staged is on the device if half of the memory that is
free there is enough; else it stays in pinned memory of the host, which the kernels read over the bus: slower,
but it never takes from the engine what that may need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits
from delta_weight_sync.device.factors import inner
from delta_weight_sync.device.gpu import Clock, free_bytes
from delta_weight_sync.device.launches import launch, read
from delta_weight_sync.vllm import device_kernels as kernels
from delta_weight_sync.vllm.changes import EXPLICIT, Changes
from delta_weight_sync.vllm.table import (
    ADDRESS,
    COUNTED,
    DIMS,
    FIRST,
    SIZES,
    SOURCE,
    TARGET,
    Rows,
    Table,
    cut,
)

BLOCK, TILE, CELLS = (int(each.value) for each in (kernels.BLOCK, kernels.TILE, kernels.CELLS))
_RUN = 16  # elements that share a factor of the digest, where the layout allows it
_ALIGNED = 16  # bytes: where arrays begin, so that no kernel is compiled anew for one that begins elsewhere


class DeviceMemory:
    """The parameters of a `Table` on a GPU."""

    def __init__(self, table: Table) -> None:
        self._table, self._device = table, table.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with self._staging():
            self._inner = inner(self._device)
            self._cells = torch.zeros(CELLS, dtype=torch.int64, device=self._device)
            (self._rows,) = self._upload([table.rows])
            self._tiles = {run: self._upload([tiles])[0] for run, tiles in _tiles(table).items()}
        if len(table.rows):
            self._warm_up()

    def digest(self) -> int:
        """What this worker counts of the live parameters' digest, read from memory."""
        with self._staging():
            self._cells.zero_()
            for run, tiles in self._tiles.items():
                arguments = (self._rows, tiles, self._inner, self._cells)
                if run == TILE:
                    launch(kernels.digest_whole, len(tiles), *arguments)
                else:
                    launch(kernels.digest, len(tiles), *arguments, run=run)
            return self._sum()

    def read(self, parts: Rows) -> Bits:
        """Live bits of parts, one after the other.

        `parts`: int64 [p, 3], of a row of the table the first element and how many.
        """
        part, offset, count = cut(parts[:, 2], TILE)
        place = np.cumsum(count) - count
        tiles = np.stack([parts[part, 0], parts[part, 1] + offset, count, place], 1)
        with self._staging():
            out = self._pinned(int(count.sum()), torch.int16)
            launch(kernels.read, len(tiles), self._rows, self._upload([tiles])[0], out)
            self._sum()
        return out.numpy().view(np.uint16)

    def prepare(self, changes: Changes) -> tuple[DeviceWrite, int]:
        """What writes the changes, and by how much they will move the digest that this worker counts."""
        arrays = (changes.blocks(BLOCK), changes.element, changes.ulps)
        with self._staging():
            blocks, element, ulps = self._upload(arrays, also=changes.ulps.nbytes)
            new = (
                torch.empty_like(ulps) if ulps.device == self._device else self._pinned(len(ulps), ulps.dtype)
            )
            self._cells.zero_()
            changed = (self._rows, blocks, element, ulps, new)
            launch(kernels.look, len(blocks), *changed, self._inner, self._cells)
            return DeviceWrite(*changed), self._sum()

    def _sum(self) -> int:
        """What kernels added up, once they have ended."""
        return int(read(self._cells.sum()))

    def _upload(self, arrays: Sequence[NDArray[Any]], also: int = 0) -> list[torch.Tensor]:
        """The arrays on the device by one copy; in pinned memory if they and so many bytes are too much."""
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
        whole = self._pinned(starts[-1], torch.uint8)
        for start, array in zip(starts, arrays, strict=False):
            whole.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if 2 * (starts[-1] + also) <= free_bytes(self._device):
            whole = whole.to(self._device, non_blocking=True)
        return [
            whole[start : start + array.nbytes].view(_kind(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def _pinned(self, size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind, pin_memory=self._device.type == "cuda")

    @contextlib.contextmanager
    def _staging(self) -> Iterator[None]:
        """Whatever the thread, on the right device and on the stream that is ours."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if self._stream:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def _warm_up(self) -> None:
        """Let all kernels be compiled now, not in the first commit's pause: on a block without changes."""
        nothing = np.array([[0, 0, 0, EXPLICIT]])
        write, _ = self.prepare(Changes(nothing, np.empty(0, np.int32), np.empty(0, np.int16)))
        write.do()
        write.undo()


class DeviceWrite:
    """Writes changes to the live parameters on the current stream, and takes them back."""

    def __init__(self, *changed: torch.Tensor) -> None:
        """`changed`: rows, blocks, elements, ulps and new bits, as `device_kernels.look` has them."""
        self._rows, self._blocks, self._element, self._ulps, self._new = changed
        self._wrong = torch.zeros(1, dtype=torch.int64, device=self._rows.device)
        self.waited_s = 0.0

    def do(self) -> int:
        """Write the new bits; returns how many of them are not there when they are read back."""
        started, clock = time.perf_counter(), Clock(self._rows.device)
        self._wrong.zero_()
        self._put(undo=False)
        written = (self._rows, self._blocks, self._element, self._new)
        launch(kernels.check, len(self._blocks), *written, self._wrong)
        clock.stop()
        wrong = int(read(self._wrong))
        self.waited_s = max(0.0, time.perf_counter() - started - clock.seconds())
        return wrong

    def undo(self) -> None:
        """Put the old bits back, however far `do` came; they are there when this returns."""
        self._put(undo=True)
        read(self._wrong)

    def _put(self, *, undo: bool) -> None:
        changed = (self._rows, self._blocks, self._element, self._ulps, self._new)
        launch(kernels.put, len(self._blocks), *changed, undo=undo)


def _kind(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _tiles(table: Table) -> dict[int, Rows]:
    """What the kernels of the digest take: the counted elements, by how many on end share a factor."""
    counted = np.flatnonzero(table.rows[:, COUNTED])
    part, offset, count = cut(table.elements[counted], TILE)
    tiles = np.stack([counted[part], offset, count], 1)
    runs = _runs(table.rows)[tiles[:, 0]]
    runs = np.where((runs == TILE) & (count < TILE), _RUN, runs)
    return {run: tiles[runs == run] for run in (TILE, _RUN, 1)}


def _runs(rows: Rows) -> NDArray[np.int64]:
    """Of each row, how many elements from a multiple of that number on share a factor: TILE, `_RUN` or one.

    TILE for those only that are consecutive in memory, too, and aligned to 16 bytes.
    """
    sizes, strides = rows[:, SIZES:SOURCE], rows[:, SOURCE:TARGET]
    flat = (sizes[:, :-1] == 1).all(1)
    outer = np.where(sizes[:, :-1] == 1, 0, strides[:, :-1])
    even = (sizes[:, -1] % _RUN == 0) & (outer % _RUN == 0).all(1)
    runs = (strides[:, -1] == 1) & (rows[:, FIRST] % _RUN == 0) & (flat | even)
    whole = (
        flat & (rows[:, TARGET + DIMS - 1] == 1) & (rows[:, FIRST] % TILE == 0) & (rows[:, ADDRESS] % 16 == 0)
    )
    return np.where(runs & whole, TILE, np.where(runs, _RUN, 1))
