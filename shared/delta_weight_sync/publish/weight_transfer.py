"""TRL's `WeightTransferProtocol` over a bucket: trainer and replicas share nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.sharded import Peers


class BucketWeightTransfer:
    """Publishes each of TRL's weight syncs as a version of a run.

        transfer = BucketWeightTransfer("hf://buckets/me/wordle#first", base="Qwen/Qwen3-0.6B")
        AsyncGRPOTrainer("Qwen/Qwen3-0.6B", ..., weight_transfer=transfer).train()

    TRL pauses generation before a sync and resumes it after that, for the whole upload. Here both do nothing:
    each replica pauses by itself, for its own commit, when it has the delta.
    """

    def __init__(
        self,
        url: str,
        base: str | Path | None = None,
        *,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        keep: str | None = None,
    ) -> None:
        """As `Publisher`; nothing is opened before training begins, and then on TRL's main process only."""
        self._url, self._base, self._encoding, self._mirror = url, base, encoding, mirror
        self._keep = keep
        self._publisher: Publisher | None = None
        self._syncs = 0

    def init_weight_transfer(self) -> None:
        """Open the run; raises as `Publisher` does."""
        # TRL gathers sharded parameters by itself and calls nobody but its main process.
        self._publisher = Publisher(
            self._url,
            self._base,
            encoding=self._encoding,
            mirror=self._mirror,
            keep=self._keep,
            peers=Peers(alone=True),
        )

    def pause(self) -> None:
        """Nothing to pause (see above)."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand over TRL's parameters, whole tensors under checkpoint names; returns after the diff."""
        if self._publisher is None:  # another `train()` of the same trainer, which does not begin anew
            self.init_weight_transfer()
        assert self._publisher is not None
        self._syncs += 1
        self._publisher.publish(iterator, self._syncs)

    def resume(self) -> None:
        """Nothing to resume (see above)."""

    def destroy(self) -> None:
        """Publish what is pending, and close the run."""
        publisher, self._publisher = self._publisher, None
        if publisher:
            with publisher:
                pass  # leaving it does both
