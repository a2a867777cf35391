"""From delta files to a commit that is ready: decoded, placed on the device, and known to be right.

All of it runs while vLLM generates. The live parameters are hashed as they are, which proves that nothing has
touched them since the last commit; the changes are located in them and move the digest to what it will be. So
the commit itself writes, reads what it wrote back, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from inference_space import scatter
from inference_space.ranks import Ranks
from inference_space.routes import Piece, Route
from shared import codec
from shared.digest_torch import change_digest, tensor_digest

Owned = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Write:
    """Elements of one piece: flat places in its memory (int64 [n]), their bits now and then (int16 [n])."""

    memory: torch.Tensor
    index: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    def do(self) -> None:
        """Write the new bits."""
        scatter.put(self.memory, self.index, self.new)

    def undo(self) -> None:
        """Put the old bits back."""
        scatter.put(self.memory, self.index, self.old)

    def check(self) -> None:
        """Raise `CodecError` unless the new bits are in memory."""
        if count := scatter.wrong(self.memory, self.index, self.new):
            raise codec.CodecError(f"{count} of {self.index.numel()} elements are not what was written")


@dataclass
class Staged:
    """A commit that is ready: `digest` is that of the parameters once all of it is written."""

    digest: int = 0
    writes: list[Write] = field(default_factory=list)


class LiveWeights:
    """The checkpoint's tensors as they are in this worker's memory."""

    def __init__(self, routes: dict[str, Route], owned: Owned, ranks: Ranks) -> None:
        """`owned`: numbers of the pieces that this worker counts in the digest."""
        self._routes, self._owned, self._ranks = routes, owned, ranks
        self.shapes = {name: route.shape for name, route in routes.items()}

    def digest(self) -> int:
        """Digest of the live parameters, of all workers, read from memory."""
        mine = sum(tensor_digest(name, self._routes[name].read(own)) for name, own in self._owned.items())
        return sum(self._ranks.gather(mine)) % (1 << 64)

    def bits(self, name: str) -> codec.Bits:
        """One whole checkpoint tensor, on the host; every worker must ask for it."""
        part = self._routes[name].read(self._owned[name])
        return self._ranks.whole(part).numpy().view(np.uint16).reshape(self.shapes[name])

    def stage(self, paths: Sequence[Path], known: int) -> Staged:
        """Prepare what the delta files do together.

        `known` is the digest that the parameters must still have; `CodecError` if they do not.
        """
        if (live := self.digest()) != known:
            raise codec.CodecError(
                f"the live weights were changed by someone: digest {live:016x}, not {known:016x}"
            )
        staged, moved = Staged(), 0
        for patch in codec.chain([codec.Delta(path) for path in paths], self.shapes, self.bits):
            for number, piece in enumerate(self._routes[patch.name].pieces):
                write, which = _locate(piece, patch)
                staged.writes.append(write)
                if number in self._owned[patch.name]:
                    index = torch.from_numpy(patch.index).to(write.index.device)[which]
                    moved += change_digest(patch.name, index, write.old, write.new)
        staged.digest = (known + sum(self._ranks.gather(moved))) % (1 << 64)
        return staged


def _locate(piece: Piece, patch: codec.Patch) -> tuple[Write, torch.Tensor | slice]:
    """The patch's elements in one piece, and which of them they are."""
    device = piece.memory.device
    index, which = piece.locate(torch.from_numpy(patch.index).to(device))
    ulps = torch.from_numpy(patch.ulps.view(np.int16)).to(device)[which]
    old = scatter.take(piece.memory, index)
    return Write(piece.memory, index, old, old + ulps), which


def commit(writes: Sequence[Write], agree: Callable[[BaseException | None], None]) -> None:
    """Write, check, and if anything fails here or on another worker, put everything back and raise."""
    done: list[Write] = []
    try:
        _write(writes, done, agree)
    except BaseException:
        for write in reversed(done):
            write.undo()
        raise


def _write(writes: Sequence[Write], done: list[Write], agree: Callable[[BaseException | None], None]) -> None:
    failure: BaseException | None = None
    try:
        for write in writes:
            done.append(write)  # before it is written: half a write is undone as well
            write.do()
        for write in writes:
            write.check()
    except BaseException as error:  # noqa: BLE001 - raised below, once every worker knows
        failure = error
    agree(failure)
    if failure:
        raise failure
