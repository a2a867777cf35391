"""What a rank that does not publish keeps of the model: its own blocks, to tell what changed in them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delta_weight_sync.codec import CodecError, Patch
from delta_weight_sync.publish.blocks import Block, local, own_block
from delta_weight_sync.publish.mirror import Mirror, Place
from delta_weight_sync.publish.sharded import Part, Weights


class Shards:
    """A rank's own blocks, as they were handed over last."""

    def __init__(self, place: Place) -> None:
        self._mirror = Mirror(place)
        self._blocks: dict[str, Block | None] = {}

    def keep(self, weights: Weights) -> None:
        """Start to mirror this rank's blocks of the parameters."""
        for name, tensor in weights:
            self._blocks[name] = own_block(tensor, main=False)
            if self._blocks[name]:
                self._mirror.add(name, local(tensor))

    def changes(self, weights: Weights) -> list[Patch]:
        """What changed in them since the last time; `CodecError` if they lie elsewhere by now."""
        found = self._mirror.find(self._parts(weights))
        self._mirror.keep(found)
        return [self._placed(patch) for patch in found.patches]

    def _parts(self, weights: Weights) -> Iterator[Part]:
        for name, tensor in weights:
            if self._is_mine(name, tensor):
                whole = Block.whole(local(tensor).shape)  # the mirror has nothing else of it
                yield Part(name, local(tensor), whole, isinstance(tensor, torch.nn.Parameter))

    def _is_mine(self, name: str, tensor: torch.Tensor) -> bool:
        block = own_block(tensor, main=False)
        if name not in self._blocks or self._blocks[name] != block:
            raise CodecError(
                f"{name} is sharded in another way than at the first sync; start the trainer anew"
            )
        return block is not None

    def _placed(self, patch: Patch) -> Patch:
        block = self._blocks[patch.name]
        assert block is not None
        return Patch(patch.name, block.shape, block.positions(patch.index), patch.ulps)
