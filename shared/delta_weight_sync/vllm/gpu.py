"""Does on a GPU, in plain PyTorch, what `vllm/memory.py` does on the host: the same arithmetic on one table.

The bits of many checkpoint tensors are copied into one flat buffer by one call. Digests and places are
arithmetic in int64 on all elements or changes together, in parts of bounded size. Only the last step, reading
and writing by index, takes a call for each tensor of vLLM's memory that changes. A model has hundreds of
these, also if its checkpoint has thousands of tensors. Sums wrap at 2^64, and may be added in any order.

Staging (the preparation of a commit) has its own stream, so that staging and vLLM do not wait for each other.
A commit runs on vLLM's stream, between two steps. Staged data is on the device if it takes at most half of
the free memory there. Otherwise it stays in pinned host memory, and a commit copies it part by part into
buffers that staging has made. That is slower, but leaves the device's memory to the engine.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from delta_weight_sync import gpu
from delta_weight_sync.codec import Bits, Index, cut
from delta_weight_sync.digest import BLOCK
from delta_weight_sync.vllm import memory
from delta_weight_sync.vllm.memory import Changes, Rows, Table, Write

HASHED = 1 << 23  # elements that are hashed or read together
_STAGED = 16  # bytes of device memory per change while a commit is staged there
_AT = memory.COLUMNS  # one more column: where a row begins in its memory, in elements


class _Load(NamedTuple):
    """Changes that are gathered or written together, and where in each flat memory."""

    all: slice
    runs: list[tuple[torch.Tensor, slice]]  # the slice begins at 0 for the first of these changes


class DeviceMemory(memory.Memory):
    """The parameters of a `Table` on a GPU."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        rows = table.rows
        self._device = table.device
        self._stream = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        with self._staging():
            found = {flat.data_ptr(): flat for flat in map(gpu.words_of, table.memory)}
            starts = np.array(sorted(found), np.int64)
            self._memories = [found[start] for start in starts.tolist()]  # flat, by address
            home = np.searchsorted(starts, rows[:, memory.ADDRESS], side="right") - 1
            self._home: Index = np.maximum(0, home)  # the memory of each row
            at = (rows[:, memory.ADDRESS] - starts[self._home]) // 2 if starts.size else rows[:, 0]
            self._columns = self._upload(np.column_stack([rows, at]).T)
        used = [dim for dim in range(memory.DIMS) if (rows[:, memory.SIZES + dim] != 1).any()]
        self._first_dim = min([*used, memory.DIMS - 1])  # all earlier dimensions have size 1
        self._flat = (rows[:, memory.SIZES : memory.SOURCE - 1] == 1).all(1)  # rows of one dimension
        self._solid = self._flat & (rows[:, memory.TARGET - 1] == 1)  # also contiguous in the checkpoint
        self._dense: list[bool] = (self._flat & (rows[:, memory.COLUMNS - 1] == 1)).tolist()  # in memory
        # Of each row, its last dimension in memory: all of a row that is flat.
        lines = np.column_stack([self._home, rows[:, [memory.SOURCE - 1, memory.COLUMNS - 1]], at]).tolist()
        self._views = [self._memories[m].as_strided((n,), (step,), first) for m, n, step, first in lines]

    def read(self, parts: Rows) -> Bits:
        """Read live bits. `parts` is int64 [p, 3]: row of the table, first element, number of elements."""
        sizes = [int(batch[:, 2].sum()) for batch in self._batches(parts)]
        out = gpu.room((sum(sizes),), torch.int16, self._device)
        with self._staging():
            for batch, target in zip(self._batches(parts), out.split(sizes), strict=True):
                target.copy_(self._bits(batch), non_blocking=True)
            gpu.wait(self._device)
        return out.numpy().view(np.uint16)

    def _hash(self, some: slice) -> NDArray[np.uint64]:
        """The digest of each of these rows. Most rows are contiguous in the checkpoint; they are hashed by
        block. In other rows, each element gets its two factors."""
        parts = self._table.parts[some]
        solid = self._solid[parts[:, 0]]
        with self._staging():
            digests = torch.zeros(len(self._table.rows), dtype=torch.int64, device=self._device)
            for batch in self._batches(parts[solid], 2 * BLOCK):
                self._hash_blocks(batch, digests)
            for batch in self._batches(parts[~solid]):
                bits = gpu.unsigned(self._bits(batch))
                of, element = self._elements(batch)
                position = self._places(memory.SOURCE, of, element).add_(self._columns[memory.FIRST][of])
                bits.mul_(gpu.factors(self._columns[memory.SEED][of], position))
                digests.index_add_(0, of, bits)
            (there,) = gpu.read([digests[some]], self._device)
        return there.numpy().view(np.uint64)

    def _hash_blocks(self, batch: Rows, digests: torch.Tensor) -> None:
        """Add the digests of parts of solid rows. The parts are copied to where they lie in blocks of the
        digest; the rest of each block is zero."""
        row, first, count = batch.T
        position = self._table.rows[row, memory.FIRST] + first
        lead = position % BLOCK
        blocks = -(-(lead + count) // BLOCK)
        number = np.arange(blocks.sum()) + np.repeat(position // BLOCK - blocks.cumsum() + blocks, blocks)
        of = self._upload(np.repeat(row, blocks))
        number = self._upload(number)
        bits = torch.zeros(int(blocks.sum()) * BLOCK, dtype=torch.int16, device=self._device)
        sizes = np.column_stack([lead, count, blocks * BLOCK - lead - count]).reshape(-1)
        self._pack(batch, bits.split(sizes.tolist())[1::3])
        sums = gpu.block_sums(bits).mul_(gpu.outer(self._columns[memory.SEED][of], number))
        digests.index_add_(0, of, sums)

    def _prepared(self, changes: Changes) -> tuple[Write, NDArray[np.uint64]]:
        order = np.argsort(self._home[changes.rows], kind="stable")  # memory by memory
        rows = changes.rows[order]
        counts = changes.counts[order]
        size = changes.ulps.size
        begin = (changes.counts.cumsum() - changes.counts)[order]
        its = [slice(*ends) for ends in np.column_stack([begin, begin + counts]).tolist()]
        fits = 2 * _STAGED * size <= gpu.free_bytes(self._device)
        with self._staging():
            element, ulps = (gpu.room((size,), kind, self._device) for kind in (torch.int32, torch.int16))
            if size:
                np.concatenate([changes.element[some] for some in its], out=element.numpy())
                np.concatenate([changes.ulps.view(np.int16)[some] for some in its], out=ulps.numpy())
            kinds = torch.int64, torch.int16, torch.int16
            if fits:
                staged = [torch.empty(size, dtype=kind, device=self._device) for kind in kinds]
            else:
                staged = [gpu.room((size,), kind, self._device) for kind in kinds]
            index, old, new = staged
            row_of = self._upload(rows)
            ends = self._upload(counts.cumsum())
            moved = torch.zeros(len(self._table.rows), dtype=torch.int64, device=self._device)
            for load in self._loads(rows, counts, gpu.CHANGES):
                numbers = torch.arange(load.all.start, load.all.stop, device=self._device)
                of = row_of[torch.searchsorted(ends, numbers, right=True)]
                number = element[load.all].to(self._device, non_blocking=True).to(torch.int64)
                at = self._places(memory.TARGET, of, number).add_(self._columns[_AT][of])
                was = _get(load.runs, at, torch.empty_like(at, dtype=torch.int16))
                now = was + ulps[load.all].to(self._device, non_blocking=True)
                for into, found in zip(staged, (at, was, now), strict=True):
                    into[load.all].copy_(found, non_blocking=True)
                position = self._places(memory.SOURCE, of, number).add_(self._columns[memory.FIRST][of])
                amount = gpu.unsigned(now) - gpu.unsigned(was)
                moved.index_add_(0, of, amount.mul_(gpu.factors(self._columns[memory.SEED][of], position)))
            loads = [*self._loads(rows, counts, max(1, size) if fits else gpu.CHANGES)]
            most = max((load.all.stop - load.all.start for load in loads), default=0)
            # An undo must not fail, so whatever it needs is there before anything is written.
            near = [torch.empty(0 if fits else most, dtype=k, device=self._device) for k in kinds[:2]]
            back = torch.empty(most, dtype=torch.int16, device=self._device)
            wrong = moved.new_zeros(1)
            (total,) = gpu.read([moved], self._device)

        def here(kept: torch.Tensor, some: slice, room: torch.Tensor) -> torch.Tensor:
            part = kept[some]
            return part if fits else room[: part.numel()].copy_(part, non_blocking=True)

        @torch.no_grad()
        def write(undo: bool) -> tuple[int, float]:  # on the caller's stream
            with gpu.on(self._device):
                started = time.perf_counter()
                gpu.wait(self._device)  # for the engine's step
                waited_s = time.perf_counter() - started
                wrong.zero_()
                for load in loads:
                    at = here(index, load.all, near[0])
                    bits = here(old if undo else new, load.all, near[1])
                    _put(load.runs, at, bits)
                    if not undo:
                        wrong.add_((_get(load.runs, at, back[: at.numel()]) != bits).sum())
                return int(gpu.read([wrong], self._device)[0]), waited_s

        return write, total.numpy().view(np.uint64)

    def _loads(self, rows: Index, counts: Index, most: int) -> Iterator[_Load]:
        """Cut changes into loads of at most `most`. The changes of rows in one memory lie together."""
        sizes = np.bincount(self._home[rows], counts, len(self._memories)).astype(np.int64)
        ends = sizes.cumsum()
        used = sizes > 0
        for some in gpu.cuts(int(counts.sum()), most):
            inside = used & (ends > some.start) & (ends - sizes < some.stop)
            starts = np.maximum(ends - sizes, some.start)
            stops = np.minimum(ends, some.stop)
            cuts = np.column_stack([starts, stops])[inside] - some.start
            numbers = np.flatnonzero(inside).tolist()
            yield _Load(
                some,
                [(self._memories[m], slice(*cut)) for m, cut in zip(numbers, cuts.tolist(), strict=True)],
            )

    def _batches(self, parts: Rows, room: int = 0) -> list[Rows]:
        """Cut parts of rows into lists, each with `HASHED` elements or some more; `room`: for each part, this
        many more count."""
        parts = cut(parts, HASHED)
        starts = np.flatnonzero(np.diff((parts[:, 2] + room).cumsum() // HASHED)) + 1
        return np.split(parts, starts) if len(parts) else []

    def _bits(self, batch: Rows) -> torch.Tensor:
        """The live bits of parts of rows, int16, one part after the other."""
        bits = torch.empty(int(batch[:, 2].sum()), dtype=torch.int16, device=self._device)
        targets = bits.split(batch[:, 2].tolist())
        flat = self._flat[batch[:, 0]]
        self._pack(batch[flat], [targets[j] for j in np.flatnonzero(flat)])
        if len(others := batch[~flat]):  # by index, because a part of a box is no box
            of, element = self._elements(others)
            at = self._places(memory.TARGET, of, element).add_(self._columns[_AT][of])
            home = self._home[others[:, 0]]
            ends = others[:, 2].cumsum()
            changes = np.flatnonzero(np.diff(home, append=-1))  # the last part of each run in one memory
            stretches = pairwise([0, *ends[changes].tolist()])
            runs = [
                (self._memories[home[j]], slice(*ends)) for j, ends in zip(changes, stretches, strict=True)
            ]
            found = _get(runs, at, torch.empty_like(at, dtype=torch.int16))
            gpu.pack(found.split(others[:, 2].tolist()), [targets[j] for j in np.flatnonzero(~flat)])
        return bits

    def _pack(self, batch: Rows, targets: Sequence[torch.Tensor]) -> None:
        """Copy parts of flat rows."""
        views = self._views
        parts = batch.tolist()
        sources = [views[row][first : first + count] for row, first, count in parts]
        gpu.pack(sources, targets, fresh=[self._dense[row] for row, _, _ in parts])

    def _elements(self, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """For each element of parts of rows: its row, and its number within the row."""
        row, first, count = batch.T
        shift = self._upload(first - count.cumsum() + count)
        size = int(count.sum())
        of = torch.repeat_interleave(self._upload(count), output_size=size)
        return self._upload(row)[of], torch.arange(size, device=self._device).add_(shift[of])

    def _places(self, strides: int, of: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
        """Distances of elements from their row's first, in the checkpoint (`strides`: SOURCE) or in memory
        (TARGET)."""
        first = self._first_dim
        last = memory.DIMS
        sizes, steps = (self._columns[kind + first : kind + last] for kind in (memory.SIZES, strides))
        return gpu.places(sizes, steps, of, element)

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return gpu.upload(np.ascontiguousarray(numbers, np.int64), self._device)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[None]:
        """Run a block on this device and on the staging stream, in any thread."""
        with torch.no_grad(), gpu.on(self._device), torch.cuda.stream(self._stream):
            yield


def _get(runs: Sequence[tuple[torch.Tensor, slice]], at: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Fill `bits` (int16 [n]) with what is at these places of flat memories, and return it."""
    for flat, some in runs:
        torch.index_select(flat, 0, at[some], out=bits[some])
    return bits


def _put(runs: Sequence[tuple[torch.Tensor, slice]], at: torch.Tensor, bits: torch.Tensor) -> None:
    """Write `bits` (int16 [n]) to these places of flat memories."""
    for flat, some in runs:
        flat.index_put_((at[some],), bits[some])
