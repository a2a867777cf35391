"""From delta files to a commit that is ready: decoded, placed in memory, and known to be right.

All of it runs while vLLM generates. The live parameters are hashed as they are, which proves that nothing has
touched them since the last commit; the changes are located in them and move the digest to what it will be. So
the commit itself writes, reads what it wrote back, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.codec import Bits
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm.changes import Changes, Found, collect, of_patch
from delta_weight_sync.vllm.host_memory import HostMemory
from delta_weight_sync.vllm.ranks import Ranks
from delta_weight_sync.vllm.reloaded import Fallback
from delta_weight_sync.vllm.table import Rows, Table, part_of
from delta_weight_sync.vllm.weight_map import Route

Owned = dict[str, tuple[int, ...]]
_BATCH = 1 << 26  # elements that are compared with a checkpoint at a time


class Step(Protocol):
    """One part of a commit; `undo` must work however far `do` came."""

    waited_s: float  # of the last `do`: how long it stood behind work that the device had before

    def do(self) -> int:
        """Write the new bits; returns how many of them are not there when they are read back."""

    def undo(self) -> None:
        """Put the old bits back."""


class Memory(Protocol):
    """The parameters of a table, on the host or on a device."""

    def digest(self) -> int:
        """What this worker counts of the live parameters' digest, read from memory."""

    def read(self, parts: Rows) -> Bits:
        """Live bits of parts, one after the other.

        `parts`: int64 [p, 3], of a row of the table the first element and how many.
        """

    def prepare(self, changes: Changes) -> tuple[Step, int]:
        """What writes the changes, and by how much they will move the digest that this worker counts."""


@dataclass
class Staged:
    """A commit that is ready: `digest` is that of the parameters once all of it is written."""

    digest: int = 0
    steps: list[Step] = field(default_factory=list)


class WeightsChangedError(DeltaWeightSyncError, RuntimeError):
    """Something other than a commit has written to the live weights."""


class LiveWeights:
    """The checkpoint's tensors as they are in this worker's memory."""

    def __init__(self, routes: dict[str, Route], owned: Owned, fallback: Fallback, ranks: Ranks) -> None:
        """`owned`: numbers of the pieces that this worker counts in the digest."""
        self._routes, self._owned, self._fallback, self._ranks = routes, owned, fallback, ranks
        self.shapes = {name: routes[name].shape for name in owned} | fallback.shapes
        self._table = Table(routes, owned)
        self._memory = memory_of(self._table)

    def digest(self) -> int:
        """Digest of the live parameters, of all workers, read from memory."""
        return int(sum(self._ranks.gather(self._memory.digest()), self._fallback.digest())) % (1 << 64)

    def bits(self, name: str) -> Bits:
        """One whole checkpoint tensor, on the host; every worker must ask for it."""
        if name in self._fallback.shapes:
            return self._fallback.bits(name)
        part = self._routes[name].read(self._owned[name])
        return self._ranks.whole(part).numpy().view(np.uint16).reshape(self.shapes[name])

    def stage(self, paths: Sequence[Path], known: int) -> Staged:
        """Prepare what the delta files do together, to weights whose digest must still be `known`.

        Raises `CodecError` for files that are no deltas of these weights, `WeightsChangedError` if it is not.
        """
        if (live := self.digest()) != known:
            raise WeightsChangedError(
                f"the live weights were changed by someone: digest {live:016x}, not {known:016x}"
            )
        reloaded: list[codec.Patch] = []
        patches = codec.chain([codec.Delta(path) for path in paths], self.shapes, self.bits)
        return self._staged(self._found(patches, reloaded), reloaded, live)

    def stage_checkpoint(self, folder: Path) -> Staged:
        """Prepare to write whatever differs from the checkpoint in `folder`, whatever is live."""
        # Nothing is written to the file; but numba would compile its kernels again for arrays that forbid it.
        wanted = checkpoint.map_bits(folder / checkpoint.WEIGHTS, "r+")
        pairs = ((name, self._fallback.bits(name), wanted[name]) for name in self._fallback.shapes)
        reloaded = [patch for pair in pairs if (patch := codec.diff(*pair)).index.size]
        return self._staged(self._differences(wanted), reloaded, self.digest())

    def _found(self, patches: Iterable[codec.Patch], reloaded: list[codec.Patch]) -> Iterator[Found]:
        """What the patches change in this worker's rows; those of tensors without a route are put aside."""
        for patch in patches:
            if patch.name in self._fallback.shapes:
                reloaded.append(patch)
            else:
                yield from of_patch(patch, self._table)

    def _differences(self, wanted: dict[str, Bits]) -> Iterator[Found]:
        """What differs between this worker's rows and a checkpoint, a batch of rows at a time."""
        names = [name for name, rows in self._table.of.items() for _ in rows]
        for batch in _batches(self._table.elements):
            live = self._memory.read(batch)
            ends = np.cumsum(batch[:, 2])
            for (row, first, count), ours in zip(batch, np.split(live, ends[:-1]), strict=True):
                theirs = part_of(self._table.rows[row], wanted[names[row]])[first : first + count]
                index, ulps = codec.diff_flat(ours, theirs, int(first))
                yield int(row), index.astype(np.int32), ulps.view(np.int16)

    def _staged(self, found: Iterable[Found], reloaded: list[codec.Patch], live: int) -> Staged:
        write, moved = self._memory.prepare(collect(found, self._table))
        reload = self._fallback.stage(reloaded)
        digest = sum(self._ranks.gather(moved), live + reload.moved()) % (1 << 64)
        return Staged(digest, [reload, write])


def memory_of(table: Table) -> Memory:
    """What reads and writes where the parameters are."""
    if table.device.type == "cpu":
        return HostMemory(table)
    from delta_weight_sync.vllm.device_memory import DeviceMemory  # only a GPU's builds bring Triton

    return DeviceMemory(table)


def _batches(elements: codec.Index) -> Iterator[Rows]:
    """All elements of all rows, as parts for `Memory.read` of at most `_BATCH` elements together."""
    batch: list[tuple[int, int, int]] = []
    room = _BATCH
    for row, size in enumerate(elements.tolist()):
        for first in range(0, size, _BATCH):
            count = min(_BATCH, size - first)
            if count > room:
                yield np.array(batch, np.int64)
                batch, room = [], _BATCH
            batch.append((row, first, count))
            room -= count
    if batch:
        yield np.array(batch, np.int64)


def commit(steps: Sequence[Step], agree: Callable[[BaseException | None], None]) -> None:
    """Write, check, and if anything fails here or on another worker, put everything back and raise."""
    done: list[Step] = []
    try:
        _write(steps, done, agree)
    except BaseException:
        for step in reversed(done):
            step.undo()
        raise


def _write(steps: Sequence[Step], done: list[Step], agree: Callable[[BaseException | None], None]) -> None:
    failure: BaseException | None = None
    try:
        wrong = 0
        for step in steps:
            done.append(step)  # before it is written: half a write is undone as well
            wrong += step.do()
        if wrong:
            raise codec.CodecError(f"{wrong} elements are not what was written")
    except BaseException as error:  # noqa: BLE001 - raised below, once every worker knows
        failure = error
    agree(failure)
    if failure:
        raise failure
