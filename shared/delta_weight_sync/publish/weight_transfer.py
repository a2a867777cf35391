"""TRL's `WeightTransferProtocol` over a bucket: `send_weights` publishes, and no server is ever paused.

TRL calls pause() before send_weights() and resume() after it, which would stop generation for the whole
upload. Here both do nothing: each replica pauses by itself, for its own commit, when it has the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from delta_weight_sync.codec import CodecError, Patch
from delta_weight_sync.publish.mirror import Mirror, Place
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.sharded import Block, Peers, gathered, local, own_block

OnSync = Callable[[Iterator[tuple[str, torch.Tensor]], int], None]  # all parameters; which sync this is


class WeightTransfer:
    """One rank's: `on_sync` is what it does with its part of the parameters at each sync."""

    def __init__(self, peers: Peers, on_sync: OnSync) -> None:
        self._peers, self._on_sync = peers, on_sync
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
            self._on_sync(weights, self.syncs)

    def resume(self) -> None:
        """Nothing to resume (see above)."""

    def destroy(self) -> None:
        """Nothing to release: the publisher belongs to `train.py`, which flushes it."""


def to_bucket(publisher: Publisher, after_first: Callable[[], None], peers: Peers) -> WeightTransfer:
    """The main rank's: publishes each of TRL's weight syncs as a version of the run.

    `after_first` runs once, after the first sync: the replicas can only start when there is a version.
    """

    def hand_over(weights: Iterator[tuple[str, torch.Tensor]], sync: int) -> None:
        if sync == 1:
            publisher.publish(weights, sync)
            after_first()
        else:
            publisher.publish(weights, sync, peers.receive)

    return WeightTransfer(peers, hand_over)


def to_main(peers: Peers, place: Place) -> WeightTransfer:
    """That of every other rank: sends the main rank what changed in its own blocks."""
    shards = _Shards(place)

    def hand_over(weights: Iterator[tuple[str, torch.Tensor]], sync: int) -> None:
        if sync == 1:
            shards.keep(weights)
        else:
            peers.send(shards.changes(weights))

    return WeightTransfer(peers, hand_over)


class _Shards:
    """A rank's own blocks, as they were handed over last."""

    def __init__(self, place: Place) -> None:
        self._mirror = Mirror(place)
        self._blocks: dict[str, Block | None] = {}

    def keep(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._blocks[name] = own_block(tensor, main=False)
            if self._blocks[name]:
                self._mirror.add(name, local(tensor))

    def changes(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[Patch]:
        return [self._diff(*named) for named in weights if self._is_mine(*named)]

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
