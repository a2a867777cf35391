"""Both sides of the speed benchmark: a trainer's model with its mirror, and a replica's memory.

The model goes back and forth between the two states of a change, so that every round finds the same work.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from bench import competitors, original
from bench.change import Change
from bench.competitors import Tensors
from bench.results import SCRATCH
from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.publish.mirror import Mirror
from delta_weight_sync.vllm import memory, worker
from delta_weight_sync.vllm.memory import Changes, Table
from delta_weight_sync.vllm.routes import Geometry, Piece, Route
from tests.support.mirrors import find, whole_parts

Format = Encoding | Literal["original"]


def bf16_tensors(bits: dict[str, Bits]) -> Tensors:
    """A copy of the weights as torch has them."""
    return {name: torch.from_numpy(array.copy()).view(torch.bfloat16) for name, array in bits.items()}


class Model:
    """The trainer's side: live parameters, the mirror, and the files it made in this round."""

    def __init__(self, change: Change) -> None:
        """`change.old` becomes the memory of the live parameters."""
        self.bits = change.old
        self._next, self._after = change.patches, [codec.inverse(patch) for patch in change.patches]
        self._fp32: Tensors = {}
        self.mirror = Mirror()
        for name, tensor in self.live():
            self.mirror.add(name, tensor)
        self.found: list[Patch] = []
        self.files: dict[str, bytes] = {}

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters: bf16, or fp32 after `to_fp32`."""
        if self._fp32:
            yield from self._fp32.items()
        else:
            for name, array in self.bits.items():
                yield name, torch.from_numpy(array).view(torch.bfloat16)

    def to_fp32(self) -> None:
        """Keep the parameters in fp32 from now on."""
        self._fp32 = {name: tensor.float() for name, tensor in self.live()}

    def turn(self) -> None:
        """Take the step to the other state."""
        for patch in self._next:
            flat = self.bits[patch.name].reshape(-1)
            codec.apply(patch, self.bits[patch.name])
            if self._fp32:
                values = torch.from_numpy(flat[patch.index]).view(torch.bfloat16).float()
                self._fp32[patch.name].view(-1)[torch.from_numpy(patch.index)] = values
        self._next, self._after = self._after, self._next

    def diff(self) -> None:
        """What the trainer waits for."""
        found = find(self.mirror, whole_parts(self.live()))
        self.mirror.keep(found)
        self.found = found.patches

    def encode(self, encoding: Format) -> None:
        """What the publisher's thread does then."""
        self._pending = {patch.name: patch for patch in self.found}
        if encoding == "original":
            self.files[encoding] = original.write(self.found, self._published)
        else:
            data = codec.encode(self.found, self._published, base=0, version=1, encoding=encoding)
            self.files[encoding] = data

    def publish_original(self, snapshot: Tensors) -> None:
        """Diff and encode as the original layout's authors do it."""
        self.files["others"] = original.publish(snapshot, self.live())

    def write(self) -> None:
        """The round's files onto the disk."""
        SCRATCH.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (SCRATCH / f"{name}.safetensors").write_bytes(content)

    def _published(self, name: str) -> Bits:
        """The bits that replicas hold: as the publisher gets them, from the mirror."""
        bits = self.mirror.bits(name).copy()
        codec.apply(codec.inverse(self._pending[name]), bits)
        return bits


class Reader:
    """The replica's side: its memory, and what it decoded last."""

    def __init__(self, model: Model) -> None:
        self.live = {name: array.copy() for name, array in model.bits.items()}
        self.tensors = {n: torch.from_numpy(array).view(torch.bfloat16) for n, array in self.live.items()}
        self._shapes = {name: array.shape for name, array in self.live.items()}
        self.patches: list[Patch] = []
        self._table, self._memory = memory_of(self.tensors)
        self._writes: list[worker.Step] = []

    def decode(self, encoding: str) -> None:
        """File to patches."""
        self.patches = list(self._read(encoding))

    def receive(self, encoding: str) -> None:
        """File to weights."""
        for patch in self._read(encoding):
            codec.apply(patch, self.live[patch.name])

    def _read(self, encoding: str) -> Iterator[Patch]:
        path = SCRATCH / f"{encoding}.safetensors"
        old = self.live.__getitem__
        if encoding == "original":
            return original.read(path, self._shapes, old)
        return codec.Delta(path).patches(self._shapes, old)

    def apply(self) -> None:
        """Add the patches."""
        for patch in self.patches:
            codec.apply(patch, self.live[patch.name])

    def take_back(self) -> None:
        """Take them back."""
        for patch in self.patches:
            codec.apply(codec.inverse(patch), self.live[patch.name])

    def stage(self) -> None:
        """Where every change goes, and to which bits, for the commit."""
        self._writes = [self._memory.prepare(changes(self.patches, self._table))[0]]

    def commit(self) -> None:
        """Write and read back, as the engine does within the pause."""
        worker.commit(self._writes, worker.Ranks(1))

    def undo(self) -> None:
        """Put the old bits back."""
        for write in self._writes:
            write.undo()

    def receive_original(self) -> None:
        """As the original layout's authors do it."""
        original.receive(SCRATCH / "others.safetensors", self.tensors)

    def digest(self) -> int:
        """Of all live weights."""
        return sum(tensor_digest(name, array) for name, array in self.live.items())

    def publish_full(self) -> None:
        """The whole model as a file."""
        competitors.publish_full(self.tensors.items(), SCRATCH / "full.safetensors")

    def receive_full(self) -> None:
        """The whole model out of the file."""
        competitors.receive_full(SCRATCH / "full.safetensors", self.tensors)


def memory_of(tensors: Tensors) -> tuple[Table, worker.Memory]:
    """bf16 tensors, all on one device, as a replica that loaded them in that layout sees them."""
    routes = {}
    for name, tensor in tensors.items():
        flat = tensor.view(torch.int16).view(-1)
        whole = Geometry(0, (flat.numel(),), (1,))
        routes[name] = Route(tuple(tensor.shape), (Piece(flat, whole, whole),))
    table = Table(routes, dict.fromkeys(routes, (0,)))
    return table, worker.memory_of(table)


def changes(patches: Sequence[Patch], table: Table) -> Changes:
    """The patches, as a commit has them."""
    return memory.find([codec.Decoded.of(patches)], [table])[0]
