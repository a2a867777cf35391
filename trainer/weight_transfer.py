"""TRL's `WeightTransferProtocol` over a bucket: `send_weights` publishes, and no server is ever paused.

TRL calls pause() before send_weights() and resume() after it, which would stop generation for the whole
upload. Here both do nothing: each replica pauses by itself, for its own commit, when it has the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from shared.codec import CodecError, Patch
from trainer.mirror import Mirror, Place
from trainer.publisher import Publisher
from trainer.sharded import Block, Peers, gathered, local, own_block


class WeightTransfer:
    """What both kinds have in common: nothing to set up, to pause or to release."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.syncs = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up: trainer and replicas only share the bucket."""

    def pause(self) -> None:
        """Nothing to pause (see above)."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand all parameters over, checkpoint names, any float dtype; returns after the diff.

        All ranks do so at once. What fails on one is raised there, and as a `PeerError` on the others.
        """
        self.syncs += 1
        weights = gathered(iterator, first=self.syncs == 1, main=self._peers.main)
        with self._peers.together(weights):
            self._hand_over(weights)

    def resume(self) -> None:
        """Nothing to resume (see above)."""

    def destroy(self) -> None:
        """Nothing to release: the publisher belongs to `train.py`, which flushes it."""

    def _hand_over(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError


class BucketWeightTransfer(WeightTransfer):
    """The main rank's: publishes each of TRL's weight syncs as a version of the run.

    `after_first` runs once, after the first sync: the replicas can only start when there is a version.
    """

    def __init__(self, publisher: Publisher, after_first: Callable[[], None], peers: Peers) -> None:
        super().__init__(peers)
        self._publisher, self._after_first = publisher, after_first

    def _hand_over(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.syncs == 1:
            self._publisher.publish(weights, self.syncs)
            self._after_first()
        else:
            self._publisher.publish(weights, self.syncs, self._peers.receive)


class ShardWeightTransfer(WeightTransfer):
    """That of every other rank: keeps a mirror of its own blocks and sends what changed to the main rank."""

    def __init__(self, peers: Peers, place: Place) -> None:
        super().__init__(peers)
        self._mirror = Mirror(place)
        self._blocks: dict[str, Block | None] = {}

    def _hand_over(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.syncs > 1:
            self._peers.send([self._diff(*named) for named in weights if self._is_mine(*named)])
            return
        for name, tensor in weights:
            self._blocks[name] = own_block(tensor, main=False)
            if self._blocks[name]:
                self._mirror.add(name, local(tensor))

    def _is_mine(self, name: str, tensor: torch.Tensor) -> bool:
        block = own_block(tensor, main=False)
        if name not in self._blocks or self._blocks[name] != block:
            raise CodecError(
                f"{name} is sharded in another way than at the first sync; start the trainer anew"
            )
        return block is not None

    def _diff(self, name: str, tensor: torch.Tensor) -> Patch:
        block, found = self._blocks[name], self._mirror.diff(name, local(tensor))
        assert block is not None
        return Patch(name, block.shape, block.positions(found.index), found.ulps)
