"""The trainer's one bf16 copy of the model, and the diff of live parameters against it.

A hand-over has two halves: `find` tells what differs and only reads, so that others may read the mirror
meanwhile, and `keep` writes it into the mirror. The mirror of a GPU's parameters is on the GPU ("device":
fastest) or in pinned host memory ("host": no GPU memory, read over the bus as it is compared); either way
only the changed elements leave the GPU. Parameters on the host are cast and compared a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from delta_weight_sync import codec, digest
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.device.pinned import pin
from delta_weight_sync.publish.sharded import Part

if TYPE_CHECKING:  # needs Triton, which only a GPU's torch brings along
    from delta_weight_sync.publish.on_device import Changes, DeviceDiff

Place = Literal["host", "device"]
_CHUNK = 1 << 18  # elements; the cast chunk stays in the cache
_HELD = 1 << 30  # bytes of gathered or merged tensors that wait to be compared at once


@dataclass(frozen=True)
class Found:
    """What differs from the mirror, by where it was compared."""

    here: list[Patch]
    there: list[Changes]

    @property
    def patches(self) -> list[Patch]:
        """One for each part that was compared, empty if it has not changed."""
        return self.here + [patch for changes in self.there for patch in changes.patches]


class Mirror:
    """The newest bits that were handed over, by parameter name."""

    def __init__(self, place: Place = "host") -> None:
        self._place = place
        self._bits: dict[str, torch.Tensor] = {}  # int16, the parameter's shape, contiguous
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._devices: dict[torch.device, DeviceDiff] = {}
        self._reachable: set[str] = set()  # by the kernels that compare the parameter
        self.digest = 0

    def __bool__(self) -> bool:
        return bool(self._bits)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        return dict(self._shapes)

    @property
    def total(self) -> int:
        """Elements of the model."""
        return sum(bits.numel() for bits in self._bits.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Start to mirror a parameter; any float dtype."""
        cast = tensor.detach().to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
        bits = cast.view(torch.int16)
        self._bits[name] = bits if self._place == "device" else bits.cpu()
        self._shapes[name] = tuple(bits.shape)
        self.digest += digest.tensor_digest(name, self._bits[name].cpu().numpy().view(np.uint16))

    def bits(self, name: str) -> Bits:
        """The bits of one parameter on the host; a view where they are there already."""
        bits = self._bits[name]
        if bits.is_cuda:
            bits = self._on(bits.device).aside.read(bits)
        return bits.numpy().view(np.uint16)

    def digest_without(self, names: set[str]) -> int:
        """Digest of the parameters that are not among `names`."""
        return sum(digest.tensor_digest(name, self.bits(name)) for name in self._shapes.keys() - names)

    def find(self, parts: Iterable[Part]) -> Found:
        """What changed in the parts since the last time, of any float dtype; nothing is written.

        Parts on the host are compared one by one as they come, those on a device all at once, or whenever
        those that were made for the hand-over take a gigabyte. Raises `CodecError` if a shape changed.
        """
        found, waiting, held = Found([], []), list[Part](), 0
        for part in parts:
            self._check(part)
            if not has_kernels(part.tensor):
                found.here.append(self._compare(part))
                continue
            waiting.append(part)
            held += 0 if part.lasting else part.tensor.nbytes
            if held > _HELD:
                found.there.extend(self._find_there(waiting))
                waiting, held = [], 0
        found.there.extend(self._find_there(waiting))
        return found

    def keep(self, found: Found) -> None:
        """Take over what was found, after which the mirror equals the parameters."""
        self.take(found.here)
        for changes in found.there:
            self.digest += changes.moved
            if self._place == "device":
                self._on(changes.tiles.device).keep(changes)
            else:
                for patch in changes.patches:
                    if patch.index.size:
                        codec.apply(patch, self.bits(patch.name))

    def take(self, patches: Iterable[Patch]) -> None:
        """Apply patches that were found elsewhere."""
        there: dict[torch.device, list[Patch]] = {}
        for patch in patches:
            bits = self._bits[patch.name]
            if bits.is_cuda:
                there.setdefault(bits.device, []).append(patch)
            else:
                flat = bits.view(-1).numpy().view(np.uint16)
                self.digest += digest.add(patch.name, flat, patch.index, patch.ulps)
        for device, some in there.items():
            self.digest += self._on(device).take(some, self._bits)

    def _check(self, part: Part) -> None:
        was, block = self._shapes[part.name], part.block
        if block.shape != was or block.extent != part.tensor.shape:
            raise codec.CodecError(f"{part.name}: shape changed from {was} to {block.shape} within a run")

    def _compare(self, part: Part) -> Patch:
        """On the host, where the parameter is."""
        old = self._bits[part.name][part.block.at].reshape(-1)  # a copy where the box is no stretch of memory
        index, ulps = diff_flat(old, part.tensor.detach().reshape(-1))
        return Patch(part.name, part.block.shape, part.block.positions(index), ulps)

    def _find_there(self, parts: list[Part]) -> list[Changes]:
        by_device: dict[torch.device, list[Part]] = {}
        for part in parts:
            by_device.setdefault(part.tensor.device, []).append(part)
        return [self._find_on(device, some) for device, some in by_device.items()]

    def _find_on(self, device: torch.device, parts: list[Part]) -> Changes:
        if far := [part.name for part in parts if part.name not in self._reachable]:
            self._bring(far, device)
            self._reachable.update(far)
        return self._on(device).find(parts, self._bits)

    def _bring(self, names: list[str], device: torch.device) -> None:
        """To where the device's kernels can read: what was added, or resumed, lies in the host's memory."""
        if self._place == "host":
            pin(self, self._bits, names, device)
            return
        for name in names:
            self._bits[name] = self._bits[name].to(device)

    def _on(self, device: torch.device) -> DeviceDiff:
        if device not in self._devices:
            from delta_weight_sync.publish.on_device import DeviceDiff

            self._devices[device] = DeviceDiff(device)
        return self._devices[device]


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels compare it; else it is compared on the host."""
    return tensor.is_cuda


def diff_flat(old: torch.Tensor, new: torch.Tensor) -> tuple[codec.Index, Bits]:
    """(index, ulps) where flat bf16 bits `old` (int16) differ from `new` (any float), both on the host."""
    found = []
    for start in range(0, old.numel(), _CHUNK):
        cast = new[start : start + _CHUNK].to(torch.bfloat16).contiguous().view(torch.int16)
        was, now = (bits.numpy().view(np.uint16) for bits in (old[start : start + _CHUNK], cast))
        found.append(codec.diff_flat(was, now, start))
    return codec.join([index for index, _ in found], np.int64), codec.join([u for _, u in found], np.uint16)
