"""The trainer's one bf16 copy of the model, and the diff of live parameters against it.

A parameter is cast and compared a chunk at a time, and the mirror takes the new bits over as they are found,
so that beside the mirror itself only a chunk and the changed elements take memory. The mirror of a GPU's
parameters is on the GPU ("device": fastest) or in pinned host memory ("host": no GPU memory, each chunk is
copied up for the comparison); either way only the changed elements leave the GPU.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.digest import change_digest, moved_digest, tensor_digest
from delta_weight_sync.publish.sharded import Block

Place = Literal["host", "device"]
_HOST_CHUNK = 1 << 18  # elements; the cast chunk stays in the cache
_DEVICE_CHUNK = 1 << 24


class Mirror:
    """The newest bits that were handed over, by parameter name."""

    def __init__(self, place: Place = "host") -> None:
        self._place = place
        self._bits: dict[str, torch.Tensor] = {}  # int16, the parameter's shape, contiguous
        self.digest = 0

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def __bool__(self) -> bool:
        return bool(self._bits)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        return {name: tuple(bits.shape) for name, bits in self._bits.items()}

    @property
    def total(self) -> int:
        """Elements of the model."""
        return sum(bits.numel() for bits in self._bits.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Start to mirror a parameter; any float dtype."""
        cast = tensor.detach().to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
        bits = cast.view(torch.int16)
        if bits.is_cuda and self._place == "host":
            bits = bits.cpu().pin_memory()
        self._bits[name] = bits
        self.digest += tensor_digest(name, self.bits(name))

    def bits(self, name: str) -> Bits:
        """The bits of one parameter on the host; a view where they are there already."""
        return self._bits[name].cpu().numpy().view(np.uint16)

    def diff(self, name: str, tensor: torch.Tensor, block: Block | None = None) -> Patch:
        """What changed since the last time, after which the mirror equals `tensor`; any float dtype.

        With `block`, `tensor` is only that box of the parameter.
        """
        if (
            tensor.is_cuda and self._place == "device" and not self._bits[name].is_cuda
        ):  # a resumed run's bits are on the host
            self._bits[name] = self._bits[name].to(tensor.device)
        whole = self._bits[name]
        old = whole[block.at] if block and block.shape == whole.shape else whole
        if old.shape != tensor.shape:
            raise codec.CodecError(
                f"{name}: shape changed from {tuple(old.shape)} to {tuple(tensor.shape)} within a run"
            )
        flat = old.reshape(-1)  # a view where the box is one stretch of memory, else a copy
        index, ulps = diff_flat(flat, tensor.detach().reshape(-1))
        if not old.is_contiguous():
            old.copy_(flat.view(old.shape))
        patch = Patch(name, tuple(whole.shape), block.positions(index) if block else index, ulps)
        self._note(patch)
        return patch

    def take(self, patch: Patch) -> None:
        """Apply a patch that was found elsewhere."""
        flat, index = self._bits[patch.name].view(-1), torch.from_numpy(patch.index)
        flat[index.to(flat.device)] += torch.from_numpy(patch.ulps.view(np.int16)).to(flat.device)
        self._note(patch)

    def _note(self, patch: Patch) -> None:
        flat = self._bits[patch.name].view(-1)
        if flat.device.type == "cpu":
            self.digest += moved_digest(patch.name, flat.numpy().view(np.uint16), patch.index, patch.ulps)
            return
        new = flat[torch.from_numpy(patch.index).to(flat.device)].cpu().numpy().view(np.uint16)
        self.digest += change_digest(patch.name, patch.index, new - patch.ulps, new)


def diff_flat(old: torch.Tensor, new: torch.Tensor) -> tuple[codec.Index, Bits]:
    """(index, ulps) where flat bf16 bits `old` (int16) differ from `new` (any float); updates `old`."""
    step = _DEVICE_CHUNK if new.is_cuda else _HOST_CHUNK
    find = _diff_on_device if new.is_cuda else _diff_on_host
    found = [
        find(old[start : start + step], new[start : start + step], start)
        for start in range(0, old.numel(), step)
    ]
    return codec.join([index for index, _ in found], np.int64), codec.join([u for _, u in found], np.uint16)


def _diff_on_host(old: torch.Tensor, new: torch.Tensor, first: int) -> tuple[codec.Index, Bits]:
    new_bits = new.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return codec.diff_flat(old.numpy().view(np.uint16), new_bits, first, update=True)


def _diff_on_device(old: torch.Tensor, new: torch.Tensor, first: int) -> tuple[codec.Index, Bits]:
    """With tensor operations, which run on every device; `old` may be in host memory."""
    new_bits = new.to(torch.bfloat16).contiguous().view(torch.int16)
    there = old.to(new.device, non_blocking=True)
    index = torch.nonzero(new_bits != there).view(-1)
    values = new_bits[index]
    ulps = (values - there[index]).cpu().numpy().view(np.uint16)
    old[index.to(old.device)] = values.to(old.device)
    return index.cpu().numpy() + first, ulps
