"""Several trainer processes and one publisher: which rank diffs which elements, and how changes reach rank 0.

Under FSDP2 each rank holds a block of each parameter (a `DTensor`), finds the changes in it, and sends them
to rank 0 once per sync. Only rank 0 holds the whole mirror and writes to the bucket. It gets whole tensors in
two cases only, one at a time: at the first sync, and for placements that are not a plain block. All ranks
call the methods here in the same order. If one fails, all stop with its message.
"""

import contextlib
import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.errors import CodecError, PeerError
from delta_weight_sync.publish.mirror import Block, Mirror, Part, Place

Weights = Iterable[tuple[str, torch.Tensor]]
_TIMEOUT = datetime.timedelta(hours=2)  # other ranks wait while rank 0 uploads the base and awaits a replica


def own_block(tensor: torch.Tensor, *, main: bool) -> Block | None:
    """The block of a parameter that this rank diffs, or None.

    The main rank diffs a tensor that every rank holds whole. If a mesh dimension holds copies of a block, the
    first rank along that dimension diffs the block.
    """
    if not is_block(tensor):
        return Block.whole(tensor.shape) if main else None
    here = tensor.device_mesh.get_coordinate() or ()
    is_copy = any(p.is_replicate() and at for p, at in zip(tensor.placements, here, strict=False))
    block = held_block(tensor)
    return None if is_copy or not math.prod(block.extent) else block


def held_block(tensor: torch.Tensor) -> Block:
    """The block of a parameter that this rank holds. The tensor must be whole or `is_block`."""
    if not isinstance(tensor, DTensor):
        return Block.whole(tensor.shape)
    place = tensor.device_mesh, tensor.placements
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, *place)
    return Block(tuple(tensor.shape), offset, extent)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter that this rank holds, detached from the graph."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_block(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a plain block, not a strided or partial one. The same on all ranks."""
    return isinstance(tensor, DTensor) and all(type(p) in (Shard, Replicate) for p in tensor.placements)


class Shards:
    """The mirror of a rank that does not publish: its own blocks, as they were at the last sync."""

    def __init__(self, place: Place, *, finite: bool = False) -> None:
        self._mirror = Mirror(place, finite=finite)
        self._blocks: dict[str, Block | None] = {}

    def begin(self, weights: Weights) -> None:
        """Mirror this rank's blocks of the parameters."""
        for name, tensor in weights:
            self._blocks[name] = own_block(tensor, main=False)
            if self._blocks[name]:
                self._mirror.add(name, local(tensor))

    def changes(self, weights: Weights) -> list[Patch]:
        """Find what changed since the last sync. Raises `CodecError` if the sharding of a tensor changed."""
        found = self._mirror.find(self._parts(weights))
        self._mirror.keep(found)
        return [
            Patch(patch.name, block.shape, block.positions(patch.index), patch.ulps)
            for patch in found.patches
            if (block := self._blocks[patch.name])
        ]

    def _parts(self, weights: Weights) -> Iterator[Part]:
        for name, tensor in weights:
            block = own_block(tensor, main=False)
            if name not in self._blocks or self._blocks[name] != block:
                raise CodecError(f"the sharding of {name} changed after the first sync: restart the trainer")
            if block:  # to the mirror, this block is a whole parameter
                whole = Block.whole(local(tensor).shape)
                yield Part(name, local(tensor), whole, isinstance(tensor, torch.nn.Parameter))


def own_parts(weights: Weights, mirror: Mirror, names: dict[str, list[Patch]]) -> Iterator[Part]:
    """Yield the parts that the main rank compares, and add the names of all weights to `names`, in order."""
    for name, tensor in weights:
        mirror.require_same(name, tensor)
        names[name] = []
        if block := own_block(tensor, main=True):
            yield Part(name, local(tensor), block, isinstance(tensor, torch.nn.Parameter))


def gathered(weights: Weights, *, first: bool, main: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, usually as each rank holds them.

    The main rank gets whole tensors: all at the `first` sync, later only those that are not a plain block.
    Every rank must iterate to the end, because this is a collective.
    """
    for name, tensor in weights:
        if not isinstance(tensor, DTensor) or (is_block(tensor) and not first):
            yield name, tensor
        else:
            full = cast(DTensor, tensor.detach().to(torch.bfloat16)).full_tensor()
            yield name, full if main else tensor


def union(parts: Iterable[Patch]) -> list[Patch]:
    """Join the ranks' patches of one tensor, which do not overlap, into one. Empty if nothing changed."""
    found = sorted((p for p in parts if p.index.size), key=lambda p: int(p.index[0]))
    if len(found) < 2:
        return found
    index, ulps = np.concatenate([p.index for p in found]), np.concatenate([p.ulps for p in found])
    if not (index[1:] > index[:-1]).all():
        order = np.argsort(index)
        index, ulps = index[order], ulps[order]
    return [Patch(found[0].name, found[0].shape, index, ulps)]


class Peers:
    """Communication between the processes of this trainer. With a single process, it does nothing.

    All processes must create a `Peers` and call its methods in the same order. With `alone`, this process
    acts as if it were the only one.
    """

    def __init__(self, *, alone: bool = False) -> None:
        several = not alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if several else None

    @property
    def main(self) -> bool:
        """Whether this is the process that publishes."""
        return self.rank == 0

    def exchange(self, message: Any, failure: str = "") -> list[Any]:
        """Return all ranks' messages, in rank order. If a rank gives a `failure`, all raise `PeerError`."""
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
    def fail_together(self, weights: Iterable[object] = ()) -> Iterator[None]:
        """Run a `with` body. If it fails on one rank, iterate `weights` to the end there, and fail on all."""
        try:
            yield
        except PeerError:
            raise  # all ranks raise it
        except Exception as error:
            for _ in weights:  # a collective: the other ranks wait in it for this one
                pass
            with contextlib.suppress(PeerError):
                self.exchange(None, f"{type(error).__name__}: {error}")
            raise
        self.exchange(None)

    def send(self, patches: Sequence[Patch]) -> None:
        """Send this rank's patches to rank 0, which calls `receive` meanwhile."""
        self.exchange([(p.name, p.shape, p.index.size) for p in patches])
        if any(p.index.size for p in patches):
            with _lost_contact():
                dist.send(_wire(np.concatenate([p.index for p in patches])), 0, group=self._group)
                dist.send(_wire(np.concatenate([p.ulps for p in patches])), 0, group=self._group)

    def receive(self) -> list[Patch]:
        """On rank 0, receive the other ranks' patches."""
        patches: list[Patch] = []
        for rank, table in enumerate(self.exchange([])):
            if not table:
                continue
            ends = np.cumsum([count for _, _, count in table])
            index, ulps = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.uint16)
            with _lost_contact():
                for column in (index, ulps) if index.size else ():
                    dist.recv(_wire(column), rank, group=self._group)
            columns = zip(table, np.split(index, ends[:-1]), np.split(ulps, ends[:-1]), strict=True)
            patches += [Patch(name, shape, at, change) for (name, shape, _), at, change in columns]
        return patches

    def share(self, bits: Bits | None, shape: Sequence[int]) -> Bits:
        """Give rank 0's `bits`, uint16 of `shape`, to every rank."""
        column = np.empty(tuple(shape), np.uint16) if bits is None else np.ascontiguousarray(bits)
        if self._group:
            with _lost_contact():
                dist.broadcast(_wire(column.reshape(-1)), 0, group=self._group)
        return column


def _wire(column: Index | Bits) -> torch.Tensor:
    return torch.from_numpy(column.view(np.uint8))


@contextlib.contextmanager
def _lost_contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"another process of the trainer has ended: see its own log ({error})") from error


def own_digest(weights: Weights, *, main: bool) -> tuple[int, set[str]]:
    """Return the digest of this rank's blocks of the live parameters, cast to bf16, and all names."""
    total, names = 0, set()
    for name, tensor in gathered(weights, first=False, main=main):
        names.add(name)
        if block := own_block(tensor, main=main):
            bits, (starts, length) = to_bits(local(tensor)).reshape(-1), block.stretches()
            for number, first in enumerate(starts.tolist()):
                total += tensor_digest(name, bits[number * length : (number + 1) * length], first)
    return total, names
