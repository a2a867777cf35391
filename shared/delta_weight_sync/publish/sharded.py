"""Several trainer processes and one publisher: who diffs which elements, and how changes reach rank 0.

Under FSDP2 a rank holds a block of each parameter (a `DTensor`). Every rank finds the changes of its own
blocks; once per hand-over they travel to rank 0, which alone holds the whole mirror and alone writes to the
bucket. So what moves between ranks is what changed, never the model, but for two cases that gather tensors in
full, one at a time: the first hand-over, and placements that are no plain block.

Ranks go through a hand-over in step. Where one fails, all of them stop with its sentence.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Bits, CodecError, Index, Patch
from delta_weight_sync.digest import change_digest
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.publish.blocks import Block, is_block, local, own_block

Weights = Iterable[tuple[str, torch.Tensor]]
_PATIENCE = datetime.timedelta(hours=2)  # rank 0 uploads the base and waits for a replica meanwhile
_CHUNK = 1 << 20  # elements hashed at a time


class PeerError(DeltaWeightSyncError, RuntimeError):
    """Another process of this trainer failed, so this one stops too."""


class Part(NamedTuple):
    """What one rank compares of a parameter: `tensor`, of the block's extent, is the block's elements.

    `lasting`: it is the parameter's memory, and not made for this hand-over.
    """

    name: str
    tensor: torch.Tensor
    block: Block
    lasting: bool


def own_parts(weights: Weights, known: Container[str], names: dict[str, list[Patch]]) -> Iterator[Part]:
    """What the main rank compares of the weights; `names` gets all of their names in order.

    Raises `CodecError` for a name that is not `known`, or comes twice.
    """
    for name, tensor in weights:
        if name not in known:
            raise CodecError(f"parameter {name} is not part of the run; start a new run for a new model")
        if name in names:
            raise CodecError(f"parameter {name} was handed over twice; give each name once")
        names[name] = []
        if block := own_block(tensor, main=True):
            yield Part(name, local(tensor), block, isinstance(tensor, torch.nn.Parameter))


def gathered(weights: Weights, *, first: bool, main: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, of which the main rank gets some in full: all at `first`, then those that are no block.

    A collective: every rank takes it to its end. The others see their own part of each tensor.
    """
    for name, tensor in weights:
        if not isinstance(tensor, DTensor) or (is_block(tensor) and not first):
            yield name, tensor
        else:
            full = cast(DTensor, tensor.detach().to(torch.bfloat16)).full_tensor()
            yield name, full if main else tensor


def union(parts: Iterable[Patch]) -> list[Patch]:
    """One patch of what several ranks found in one tensor, which does not overlap; none without changes."""
    found = sorted((p for p in parts if p.index.size), key=lambda p: int(p.index[0]))
    if len(found) < 2:
        return found
    index, ulps = (
        np.concatenate(columns) for columns in zip(*((p.index, p.ulps) for p in found), strict=True)
    )
    if not (index[1:] > index[:-1]).all():
        order = np.argsort(index)
        index, ulps = index[order], ulps[order]
    return [Patch(found[0].name, found[0].shape, index, ulps)]


class Peers:
    """The processes of this trainer; with a single one there is nobody to wait for.

    Of several, all must create it and then call its methods in the same order, but for one that is `alone`.
    """

    def __init__(self, *, alone: bool = False) -> None:
        several = not alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if several else None

    @property
    def main(self) -> bool:
        """True for the one process that publishes."""
        return self.rank == 0

    def exchange(self, message: Any, failure: str = "") -> list[Any]:
        """Every rank's message, in the order of ranks. Raises `PeerError` on all ranks if one failed."""
        if self._group is None:
            return [message]
        answers: list[Any] = [None] * self.size
        with _lost_contact():
            dist.all_gather_object(answers, (message, failure), group=self._group)
        for rank, (_, sentence) in enumerate(answers):
            if sentence:
                raise PeerError(f"rank {rank} of the trainer stopped the run: {sentence}")
        return [answer for answer, _ in answers]

    @contextlib.contextmanager
    def together(self, weights: Iterable[object] = ()) -> Iterator[None]:
        """What is within ends on all ranks alike: well, or with an error; `weights` is taken to its end."""
        try:
            yield
        except PeerError:
            raise  # every rank knows
        except Exception as error:
            for _ in weights:  # the others wait for this rank in its collectives
                pass
            with contextlib.suppress(PeerError):
                self.exchange(None, f"{type(error).__name__}: {error}")
            raise
        self.exchange(None)

    def send(self, patches: Sequence[Patch]) -> None:
        """Hand what this rank found to rank 0, which is in `receive`."""
        self.exchange([(p.name, p.shape, p.index.size) for p in patches])
        with _lost_contact():
            if any(p.index.size for p in patches):
                dist.send(_wire(np.concatenate([p.index for p in patches])), 0, group=self._group)
                dist.send(_wire(np.concatenate([p.ulps for p in patches])), 0, group=self._group)

    def receive(self) -> list[Patch]:
        """On rank 0: what the other ranks found."""
        tables = self.exchange([])
        return [patch for rank, table in enumerate(tables) if table for patch in self._from(rank, table)]

    def share(self, bits: Bits | None, shape: Sequence[int]) -> Bits:
        """Rank 0's `bits`, uint16 of `shape`, on every rank."""
        if self._group is None:
            assert bits is not None
            return bits
        column = np.empty(tuple(shape), np.uint16) if bits is None else np.ascontiguousarray(bits)
        with _lost_contact():
            dist.broadcast(_wire(column.reshape(-1)), 0, group=self._group)
        return column

    def _from(self, rank: int, table: list[tuple[str, tuple[int, ...], int]]) -> list[Patch]:
        ends = np.cumsum([count for _, _, count in table])
        index, ulps = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.uint16)
        with _lost_contact():
            for column in (index, ulps) if index.size else ():
                dist.recv(_wire(column), rank, group=self._group)
        columns = zip(table, np.split(index, ends[:-1]), np.split(ulps, ends[:-1]), strict=True)
        return [Patch(name, shape, at, change) for (name, shape, _), at, change in columns]


def _wire(column: Index | Bits) -> torch.Tensor:
    return torch.from_numpy(column.view(np.uint8))


@contextlib.contextmanager
def _lost_contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"another process of the trainer is gone; its own log says why ({error})") from error


def own_digest(weights: Weights, *, main: bool) -> tuple[int, set[str]]:
    """Digest of this rank's own blocks of the live parameters, cast to bf16, and the names of all of them."""
    total, names = 0, set()
    for name, tensor in gathered(weights, first=False, main=main):
        names.add(name)
        if block := own_block(tensor, main=main):
            total += _block_digest(name, block, to_bits(local(tensor)).reshape(-1))
    return total, names


def _block_digest(name: str, block: Block, bits: Bits) -> int:
    total = 0
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        index = block.positions(np.arange(start, start + part.size))
        total += change_digest(name, index, np.zeros_like(part), part)
    return total
