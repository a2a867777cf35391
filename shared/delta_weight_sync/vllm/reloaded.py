"""Tensors without a route: kept on the host as bits and loaded anew, whole, by vLLM's own loader.

A few loaders do not copy a tensor but compute with it: they cast it to float32, concatenate it, change its
order. The model then no longer holds the checkpoint's bits, so they cannot be patched in place, nor proven by
a digest of live weights. Loading the patched tensor again leaves exactly what a fresh start would; its digest
is the mirror's. Correct and slow: every commit loads all such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.digest import change_digest, state_digest
from delta_weight_sync.digest_torch import tensor_digest
from delta_weight_sync.vllm.loader_trace import RouteError

Elements = dict[str, tuple[Index, Bits]]
"""Checkpoint name -> flat positions int64 [n] and bf16 patterns uint16 [n]."""


class Fallback:
    """Host mirror of all tensors of a run that have no route; on every rank the same."""

    def __init__(self, model: torch.nn.Module, bits: Mapping[str, Bits]) -> None:
        """`bits`: checkpoint name -> what vLLM loaded, in the tensor's shape; it may be empty.

        Loads them once more to prove that this works. Raises `RouteError` if it fails or changes anything:
        the model is damaged then and must not be served.
        """
        self._model = model
        self._bits = {name: tensor.copy() for name, tensor in bits.items()}
        if bits:
            self._prove()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor without a route."""
        return {name: bits.shape for name, bits in self._bits.items()}

    def bits(self, name: str) -> Bits:
        """A tensor as it is now; not to be changed."""
        return self._bits[name]

    def digest(self) -> int:
        """These tensors' share of the state digest; of several ranks, one counts it."""
        return state_digest(self._bits)

    def stage(self, patches: Sequence[Patch]) -> Reload:
        """What the patches, all of mirrored tensors, are going to write."""
        old = {
            patch.name: (patch.index, self._bits[patch.name].reshape(-1)[patch.index]) for patch in patches
        }
        new = {patch.name: (patch.index, old[patch.name][1] + patch.ulps) for patch in patches}
        return Reload(self, old, new)

    def write(self, elements: Elements) -> None:
        """Set bits in the mirror, then, if there were any, the model to the mirror."""
        for name, (index, bits) in elements.items():
            self._bits[name].reshape(-1)[index] = bits
        if elements:
            self._load()

    def _load(self) -> None:
        """All at once, for a loader may wait until it has several; copies, for it may work in place."""
        from vllm.model_executor.model_loader import checkpoint_weight_patch as native

        values = {
            name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, bits in self._bits.items()
        }
        patches = [
            native.CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.reshape(-1))
            for name, tensor in values.items()
        ]
        size = sum(tensor.nbytes for tensor in values.values())
        native.load_checkpoint_weight_patches(self._model, patches, max_chunk_bytes=size)

    def _prove(self) -> None:
        before, names = self._fingerprints(), ", ".join(self._bits)
        try:
            self._load()
        except Exception as error:
            raise RouteError(f"vLLM cannot load {names} into the running model ({error!r})") from error
        if changed := [name for name, number in self._fingerprints().items() if number != before[name]]:
            raise RouteError(f"vLLM changed {changed[0]} after loading {names}; deltas cannot do that")

    def _fingerprints(self) -> dict[str, int]:
        """A number for the bits of each floating-point tensor of the model."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        wide = [(name, t.detach()) for name, t in tensors if t.is_floating_point() and t.element_size() > 1]
        return {name: tensor_digest("", t.reshape(-1).view(torch.int16)) for name, t in wide}


@dataclass
class Reload:
    """A commit's share of the tensors without a route: some of their elements as they are and will be."""

    fallback: Fallback
    old: Elements
    new: Elements
    waited_s: float = 0.0

    def do(self) -> int:
        """Load the tensors with the new bits; the model holds none that could be read back."""
        self.fallback.write(self.new)
        return 0

    def undo(self) -> None:
        """Load them with the old bits, however far `do` came."""
        self.fallback.write(self.old)

    def moved(self) -> int:
        """By how much this moves the state digest (mod 2^64); of several ranks, one counts it."""
        pairs = ((name, *self.old[name], self.new[name][1]) for name in self.new)
        return sum(change_digest(*pair) for pair in pairs)
