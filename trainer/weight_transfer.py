"""TRL's `WeightTransferProtocol` over a bucket: `send_weights` publishes, and no server is ever paused.

TRL calls pause() before send_weights() and resume() after it, which would stop generation for the whole
upload. Here both do nothing: each replica pauses by itself, for its own commit, when it has the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trainer.publisher import Publisher


class BucketWeightTransfer:
    """Publishes each of TRL's weight syncs as a version of the run.

    `after_first` runs once, after the first sync: the replicas can only start when there is a version.
    """

    def __init__(self, publisher: Publisher, after_first: Callable[[], None]) -> None:
        self._publisher, self._after_first = publisher, after_first
        self.syncs = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up: trainer and replicas only share the bucket."""

    def pause(self) -> None:
        """Nothing to pause (see above)."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand all parameters over, checkpoint names, any float dtype; returns after the diff."""
        self.syncs += 1
        self._publisher.publish(iterator, sync=self.syncs)
        if self.syncs == 1:
            self._after_first()

    def resume(self) -> None:
        """Nothing to resume (see above)."""

    def destroy(self) -> None:
        """Nothing to release: the publisher belongs to `train.py`, which flushes it."""
