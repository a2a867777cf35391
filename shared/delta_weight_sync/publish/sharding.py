"""Several ranks: which rank diffs which elements, which rank owns which tensors, and how they communicate.

Under FSDP2, each rank holds a block of each parameter (a `DTensor`). Once per sync, the rank finds the
changes in its block and sends them to the tensor's owner. The owner mirrors the whole tensor, and encodes and
uploads the tensor's changes. To find changes, every rank also mirrors its blocks of tensors that others own.
The ranks begin these mirrors at the first sync. So at that sync, owners get their tensors whole, one at a
time. (If rank 0 has weights before that, of the base or of the newest version, it sends the owners theirs.)
If a tensor's placements are not a plain block (see `is_block`), its owner gets it whole at every sync.

All ranks call the methods here in the same order. If one rank fails, all stop with that rank's message.
"""

import contextlib
import datetime
import functools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from delta_weight_sync.checkpoint import DTYPES, Shapes, dtype_of, to_bits
from delta_weight_sync.codec import Bits, Decoded, Patch
from delta_weight_sync.collectives import all_to_all
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.errors import CheckpointError, CodecError, PeerError
from delta_weight_sync.publish.blocks import Block, Part
from delta_weight_sync.publish.mirror import Found, Mirror, Place, not_finite
from delta_weight_sync.publish.names import Joined
from delta_weight_sync.publish.plan import Plan, Target
from delta_weight_sync.records import MAX_PARTS

Weights = Iterable[tuple[str, torch.Tensor]]
Owns = Callable[[str, Sequence[int]], bool]  # whether this rank owns a tensor: name, shape of its words
# Long, because a rank may wait until another rank has uploaded, or until rank 0 has found a ready replica.
_TIMEOUT = datetime.timedelta(hours=2)


class Owners(dict[str, int]):
    """Name of each tensor -> its owner. All ranks get equal owners if they add tensors in the same order."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        parts = min(ranks, MAX_PARTS)  # number of owners, spread evenly over the ranks
        self._loads = {number * ranks // parts: 0 for number in range(parts)}  # elements of each owner

    def of(self, name: str, shape: Sequence[int]) -> int:
        """Return a tensor's owner. A new tensor goes to the owner of the fewest elements."""
        if name not in self:
            self[name] = min(self._loads, key=self._loads.__getitem__)
            self._loads[self[name]] += math.prod(shape)
        return self[name]


def held_block(tensor: torch.Tensor) -> Block:
    """Return the block of a tensor that this rank holds. The tensor must have no `Partial` placement."""
    if not isinstance(tensor, DTensor):
        return Block.whole(tensor.shape)
    return _block(tensor.shape, tensor.placements, tensor.device_mesh)[0]


def is_copy(tensor: DTensor) -> bool:
    """Whether this rank's block is a copy of a block that another rank diffs and saves."""
    return _block(tensor.shape, tensor.placements, tensor.device_mesh)[1]


@functools.lru_cache(4096)  # torch takes 50 us for each call, and a model has few shapes
def _block(shape: torch.Size, placements: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[Block, bool]:
    """Return this rank's block, and what `is_copy` says of it."""
    here = mesh.get_coordinate() or ()
    copied = any(p.is_replicate() and at for p, at in zip(placements, here, strict=False))
    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Block(tuple(shape), offset, extent), copied


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter that this rank holds, detached from the graph."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # otherwise `to_local` records a step of the graph, in 40 us
        return tensor.to_local().detach()


def is_block(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a plain block, not a strided or partial one. All ranks get the same answer."""
    return isinstance(tensor, DTensor) and all(type(p) in (Shard, Replicate) for p in tensor.placements)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a version, as this rank holds it.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its dtype in a version.
        shape: The shape of the whole tensor's words.
        tensor: This rank's elements. If `dtype` is BF16, a tensor of any float dtype, which the mirror
            rounds. Otherwise its words, as a bf16 tensor.
        block: Which of the tensor's words these are. If this rank's part is no plain block, the whole tensor.
        is_sharded: Whether other ranks hold other blocks.
        is_copy: Whether another rank diffs the same block.
        is_lasting: Whether `tensor` is the parameter's own memory, not a copy made for this sync.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    block: Block
    is_sharded: bool = False
    is_copy: bool = False
    is_lasting: bool = True

    def own_block(self, *, owner: bool) -> Block | None:
        """The block that this rank diffs, or None.

        Only the owner diffs a tensor that is not sharded into plain blocks. If a mesh dimension holds copies
        of a block, the first rank along that dimension diffs the block.
        """
        if not self.is_sharded:
            return self.block if owner else None
        return None if self.is_copy or not math.prod(self.block.extent) else self.block

    def part(self, block: Block) -> Part:
        """This rank's elements, to be compared. `block`: their place in the mirror's tensor."""
        return Part(self.name, self.tensor, block, self.is_lasting)

    def require_finite(self) -> None:
        """Raise `CodecError` for NaN and infinity. The mirror does so for bf16, but not for other dtypes."""
        if self.dtype in ("F16", "F32", "F64"):
            values = self.tensor.view(getattr(torch, DTYPES[self.dtype][0]))
            if not values.isfinite().all():
                raise not_finite(self.name)


def as_words(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the words of a tensor that is cast to `dtype`, as a bf16 tensor; for BF16, `tensor` itself."""
    if dtype == "BF16":
        return tensor
    name, size = DTYPES[dtype]
    cast = tensor.to(getattr(torch, name))
    if size == 1:
        return cast.view(torch.uint8).to(torch.int16).view(torch.bfloat16)
    return cast.view(torch.bfloat16) if size == 2 else cast.contiguous()[..., None].view(torch.bfloat16)


class Shards:
    """Mirrors this rank's blocks of tensors that other ranks own."""

    def __init__(self, place: Place, *, finite: bool = False) -> None:
        self.mirror = Mirror(place, finite=finite)
        self._blocks: dict[str, Block | None] = {}

    def begin(self, held: Held) -> None:
        """Mirror the block of a tensor that this rank diffs, if there is one."""
        self._blocks[held.name] = held.own_block(owner=False)
        if self._blocks[held.name]:
            self.mirror.add(held.name, held.tensor, held.dtype)

    def part(self, held: Held) -> Part | None:
        """Return the part of a tensor to compare, or None. Raises `CodecError` if the sharding changed."""
        block = held.own_block(owner=False)
        if held.name not in self._blocks or self._blocks[held.name] != block:
            raise CodecError(f"the sharding of {held.name} changed after the first sync: restart the trainer")
        # This mirror treats the block as a whole tensor.
        return held.part(Block.whole(tuple(held.tensor.shape))) if block else None

    def keep(self, found: Found) -> list[Patch]:
        """Write the changes into the mirror. Return them as patches with positions in the whole tensors."""
        self.mirror.keep(found)
        return [
            Patch(patch.name, block.shape, block.positions(patch.index), patch.ulps)
            for patch in found.patches
            if patch.index.size and (block := self._blocks[patch.name])
        ]


def gathered(weights: Weights, plan: Plan, owns: Owns, *, first: bool) -> Iterator[Held]:
    """Yield the tensors of a version that the trainer's tensors make, usually as each rank holds them.

    Tensors that `owns(name, shape)` claims for this rank come whole: all of them at the `first` sync, later
    only those that are not a plain block. Every rank must iterate to the end, because the ranks gather
    tensors together.
    """
    waiting: dict[str, torch.Tensor] = {}  # sources of `Joined`
    for name, tensor in weights:
        if joined := plan.joined(name):
            waiting[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            if waiting.keys() >= set(joined.sources):
                parameters = {source: waiting.pop(source) for source in joined.sources}
                yield from _computed(plan, joined, parameters, owns)
            continue
        targets = plan.targets(name, tensor)
        own = [owns(target.name, target.words) for target in targets]
        if not isinstance(tensor, DTensor):
            plain = tensor.detach()
            lasting = isinstance(tensor, torch.nn.Parameter)
            for target in targets:
                yield _whole(target, plain, lasting=lasting)
        elif is_block(tensor) and not first:
            yield from (_blocked(target, tensor) for target in targets)
        else:
            # In bf16, if versions are, because other ranks send their blocks.
            dtype = torch.bfloat16 if {target.dtype for target in targets} == {"BF16"} else tensor.dtype
            full = cast(DTensor, tensor.detach().to(dtype)).full_tensor()
            if any(own) and tensor.dtype != dtype and not full.is_cuda:
                full.masked_fill_(full.isnan(), torch.nan)  # as `to_bits` casts NaN; torch's bits may differ
            for target, mine in zip(targets, own, strict=True):
                if mine:
                    yield _whole(target, full, lasting=False)
                elif is_block(tensor):
                    yield _blocked(target, tensor)
                else:
                    yield Held(target.name, target.dtype, target.words, full, Block.whole(target.words))
    if waiting:
        name = next(iter(waiting))
        lacking = sorted(set(cast(Joined, plan.joined(name)).sources) - waiting.keys())
        raise CheckpointError(
            f"{name} was published, but not {lacking[0]}: the checkpoint has both in one tensor, so publish"
            " both"
        )


def _computed(
    plan: Plan, joined: Joined, parameters: Mapping[str, torch.Tensor], owns: Owns
) -> Iterator[Held]:
    """The tensors that are computed from several whole parameters. Every rank has them whole."""
    made = plan.names.compute(parameters)
    for name in joined.names:
        target = plan.target(name, dtype_of(made[name]), tuple(made[name].shape))
        owns(name, target.words)
        yield _whole(target, made[name], lasting=False)


def _whole(target: Target, tensor: torch.Tensor, *, lasting: bool) -> Held:
    """A tensor of a version, of which this rank has the trainer's whole tensor."""
    name, dtype, shape, view = target
    values = view.of(tensor) if view else tensor
    words = as_words(values, dtype)
    lasting = lasting and (words is values or words.data_ptr() == values.data_ptr())
    return Held(name, dtype, shape, words, Block.whole(shape), is_lasting=lasting)


def _blocked(target: Target, tensor: DTensor) -> Held:
    """A tensor of a version, of which this rank has a block."""
    held = local(tensor)
    block = held_block(tensor)
    if view := target.view:
        # The part of the view's box that lies in this rank's block.
        first, end = np.array(view.box).T
        start = np.maximum(block.offset, first)
        stop = np.minimum(np.add(block.offset, block.extent), end)
        if (start >= stop).any():  # this rank has nothing of the view
            start = stop = np.array(block.offset)
        held = view.cut(held, np.stack([start, stop], 1) - np.array(block.offset)[:, None])
        offset = (start - first)[[*view.dims]].clip(0).tolist()
        block = Block(view.shape, tuple(offset), tuple(held.shape))
    if wide := target.words[len(block.shape) :]:  # several words per element
        block = Block(target.words, (*block.offset, 0), (*block.extent, *wide))
    words = as_words(held, target.dtype)
    lasting = isinstance(tensor, torch.nn.Parameter) and words.data_ptr() == held.data_ptr()
    return Held(target.name, target.dtype, target.words, words, block, True, is_copy(tensor), lasting)


def union(parts: Iterable[Patch]) -> list[Patch]:
    """Join the ranks' patches of one tensor, which do not overlap. Return one, or none if all are empty."""
    found = [part for part in parts if part.index.size]
    if len(found) < 2:
        return found
    found.sort(key=lambda part: int(part.index[0]))
    index = np.concatenate([p.index for p in found])
    ulps = np.concatenate([p.ulps for p in found])
    if not (index[1:] > index[:-1]).all():
        order = np.argsort(index)
        index = index[order]
        ulps = ulps[order]
    return [Patch(found[0].name, found[0].shape, index, ulps)]


class Peers:
    """Communication between the ranks, the processes of this trainer. A single process sends nothing.

    All processes must create a `Peers` and call its methods in the same order. With `alone`, this process
    acts as if it were the only one.
    """

    def __init__(self, *, alone: bool = False) -> None:
        several = not alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if several else None
        self._ended: PeerError | None = None  # the error that ended this communication

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes manifests and HEAD."""
        return self.rank == 0

    @contextlib.contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._ended = PeerError(f"another process of the trainer has ended: see its own log ({error})")
            raise self._ended from error

    def exchange(self, message: Any, failure: str = "") -> list[Any]:
        """Return all ranks' messages, in rank order. If a rank gives a `failure`, all raise `PeerError`."""
        if self._group is None:
            return [message]
        answers: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(answers, (message, failure), group=self._group)
        for rank, (_, sentence) in enumerate(answers):
            if sentence:
                self._ended = PeerError(f"rank {rank} of the trainer stopped the run: {sentence}")
                raise self._ended
        return [answer for answer, _ in answers]

    @contextlib.contextmanager
    def fail_together(self, weights: Iterable[object] = ()) -> Iterator[None]:
        """Run a `with` body. If it fails on a rank, that rank iterates `weights` to the end, and all fail."""
        try:
            yield
        except Exception as error:
            if error is self._ended:
                raise  # the other ranks raise this error, too, or are gone
            for _ in weights:  # gathering is collective: the other ranks wait for this one
                pass
            with contextlib.suppress(PeerError):
                self.exchange(None, f"{type(error).__name__}: {error}")
            raise
        self.exchange(None)

    def all_to_all(self, patches: Iterable[Patch], owners: Mapping[str, int], shapes: Shapes) -> list[Patch]:
        """Send each patch to the owner of its tensor. Return the patches that came, sender by sender."""
        if self._group is None:
            return []
        outgoing: list[list[Patch]] = [[] for _ in range(self.size)]
        for patch in patches:
            outgoing[owners[patch.name]].append(patch)
        large = any(math.prod(shape) > 1 << 31 for shape in shapes.values())
        kind = np.int64 if large else np.int32  # dtype of positions; small, because they may take gigabytes
        sent = (replace(one, index=one.index.astype(kind)) for one in map(Decoded.of, outgoing))
        packed = [np.frombuffer(pickle.dumps(one, pickle.HIGHEST_PROTOCOL), np.uint8) for one in sent]
        sizes = [size[self.rank] for size in self.exchange([data.size for data in packed])]
        with self._contact():
            coming = all_to_all(packed, sizes, self._group)
        came = (pickle.loads(part.data) for part in np.split(coming, np.cumsum(sizes[:-1])))
        parts = (replace(one, index=one.index.astype(np.int64)) for one in came)
        return [patch for part in parts for patch in part.patches(shapes)]

    def scatter(
        self, tensors: Iterable[tuple[str, str, Bits]], owners: Owners
    ) -> Iterator[tuple[str, str, tuple[int, ...], Bits | None]]:
        """Send rank 0's tensors (name, dtype, words) to their owners, one by one.

        Yields each tensor's name, dtype, and the shape and content of its words (uint16). On ranks that do
        not own it, the content is None.
        """
        source = iter(tensors)
        while True:
            name, dtype, bits = (next(source, None) if self.main else None) or ("", "", None)
            name, dtype, shape = self.exchange((name, dtype, bits.shape if bits is not None else ()))[0]
            if not name:
                return
            owner = owners.of(name, shape)
            if owner and self.rank in (0, owner):
                bits = np.empty(shape, np.uint16) if bits is None else np.ascontiguousarray(bits)
                wire = torch.from_numpy(bits.reshape(-1).view(np.uint8))
                with self._contact():
                    dist.send(wire, owner, self._group) if self.main else dist.recv(wire, 0, self._group)
            yield name, dtype, shape, bits if owner == self.rank else None


def own_digest(weights: Weights, plan: Plan, owners: Mapping[str, int], rank: int) -> tuple[int, set[str]]:
    """Return the digest of the words that this rank diffs, and the names of all tensors of a version."""
    total = 0
    names = set()
    for held in gathered(weights, plan, lambda name, _: owners[name] == rank, first=False):
        names.add(held.name)
        if block := held.own_block(owner=owners[held.name] == rank):
            bits = to_bits(held.tensor).reshape(-1)
            starts, length = block.stretches()
            for number, first in enumerate(starts.tolist()):
                total += tensor_digest(held.name, bits[number * length : (number + 1) * length], first)
    return total, names
