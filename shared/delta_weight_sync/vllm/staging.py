"""From delta files to a commit that is ready: decoded, placed on the device, and known to be right.

All of it runs while vLLM generates. The live parameters are hashed as they are, which proves that nothing has
touched them since the last commit; the changes are located in them and move the digest to what it will be. So
the commit itself writes, reads what it wrote back, and that is all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.digest_torch import change_digest, tensor_digest
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm import scatter
from delta_weight_sync.vllm.ranks import Ranks
from delta_weight_sync.vllm.reloaded import Fallback
from delta_weight_sync.vllm.weight_map import Piece, Route

Owned = dict[str, tuple[int, ...]]
Count = int | torch.Tensor
_DENSE = 3  # with a change in every so many elements, a piece takes less memory than places and values


@dataclass(frozen=True)
class Write:
    """Elements of one piece: flat places in its memory (int64 [n]), their bits now and then (int16 [n])."""

    memory: torch.Tensor
    index: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    def do(self) -> Count:
        """Write the new bits."""
        return scatter.put(self.memory, self.index, self.new)

    def undo(self) -> None:
        """Put the old bits back."""
        scatter.put(self.memory, self.index, self.old)


@dataclass(frozen=True)
class DenseWrite:
    """All elements of one piece, where many change: a view of them, their bits now and then, of one shape."""

    view: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    def do(self) -> Count:
        """Write the new bits."""
        return scatter.fill(self.view, self.new)

    def undo(self) -> None:
        """Put the old bits back."""
        scatter.fill(self.view, self.old)


class Step(Protocol):
    """One part of a commit; `undo` must work however far `do` came."""

    def do(self) -> Count:
        """Write the new bits; returns how many of them are not there when they are read back."""

    def undo(self) -> None:
        """Put the old bits back."""


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

    def digest(self) -> int:
        """Digest of the live parameters, of all workers, read from memory."""
        mine = sum(tensor_digest(name, self._routes[name].read(own)) for name, own in self._owned.items())
        return int(sum(self._ranks.gather(mine), self._fallback.digest())) % (1 << 64)

    def bits(self, name: str) -> codec.Bits:
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
        return self._stage(codec.chain([codec.Delta(path) for path in paths], self.shapes, self.bits), live)

    def stage_checkpoint(self, folder: Path) -> Staged:
        """Prepare to write whatever differs from the checkpoint in `folder`, whatever is live."""
        wanted = checkpoint.read_bits(folder)
        patches = (codec.diff(name, self.bits(name), bits) for name, bits in wanted if name in self.shapes)
        return self._stage((patch for patch in patches if patch.index.size), self.digest())

    def _stage(self, patches: Iterable[codec.Patch], live: int) -> Staged:
        staged, moved, reloaded = Staged(), 0, []
        for patch in patches:
            if patch.name in self._fallback.shapes:
                reloaded.append(patch)
            elif patch.name in self._owned:
                moved += self._locate(patch, staged.steps)
        reload = self._fallback.stage(reloaded)
        staged.steps.insert(0, reload)
        staged.digest = sum(self._ranks.gather(moved), live + reload.moved()) % (1 << 64)
        return staged

    def _locate(self, patch: codec.Patch, steps: list[Step]) -> int:
        """Add the writes of one tensor; returns by how much those that this worker counts move the digest."""
        moved, changes = 0, (patch.index, patch.ulps.view(np.int16))
        for number, piece in enumerate(self._routes[patch.name].pieces):
            index, ulps = (torch.from_numpy(a).to(piece.memory.device) for a in changes)
            places, which = piece.locate(index)
            old, new = scatter.moved(piece.memory, places, ulps[which])
            dense = _DENSE * places.numel() > math.prod(piece.target.sizes)
            steps.append((_dense_write if dense else _write_places)(piece, places, old, new))
            if number in self._owned[patch.name]:
                moved += change_digest(patch.name, index[which], old, new)
        return moved


def _write_places(piece: Piece, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Step:
    return Write(piece.memory, places, old, new)


def _dense_write(piece: Piece, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Step:
    view, changed = piece.target.of(piece.memory), piece.memory.clone()
    scatter.put(changed, places, new)
    return DenseWrite(view, view.clone(), piece.target.of(changed).clone())


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
    wrong: Count = 0
    try:
        for step in steps:
            done.append(step)  # before it is written: half a write is undone as well
            wrong = wrong + step.do()
        if count := int(wrong):
            raise codec.CodecError(f"{count} elements are not what was written")
    except BaseException as error:  # noqa: BLE001 - raised below, once every worker knows
        failure = error
    agree(failure)
    if failure:
        raise failure
