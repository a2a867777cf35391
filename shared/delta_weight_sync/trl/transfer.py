"""Implements TRL's `WeightTransferProtocol` with a bucket. Trainer and replicas share nothing else."""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish import arguments
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.sharding import Peers
from delta_weight_sync.records import Manifest
from delta_weight_sync.trl import hooks

if TYPE_CHECKING:
    from delta_weight_sync.callback import MetricsCallback


class BucketWeightTransfer:
    """Publishes TRL's weight syncs as versions of a run. With `peft_config`, versions are merged (see
    `Publisher.publish`).

        transfer = BucketWeightTransfer("hf://buckets/me/wordle#first", base="Qwen/Qwen3-0.6B")
        options = {"weight_transfer": transfer, "callbacks": [transfer.metrics()]}
        AsyncGRPOTrainer("Qwen/Qwen3-0.6B", ..., **options).train()

    Creating a transfer also patches TRL in this process (see `delta_weight_sync.trl.patches`), so that the
    trainer needs no vLLM, no kernel from the Hub and no GPU. Without a GPU, set TRL's option `use_cpu=True`.

    TRL calls `pause` before it sends weights, and `resume` after that. Here both methods do nothing: each
    replica commits by itself once it has the delta, between two steps of vLLM. (If its release of vLLM cannot
    do that, the replica pauses vLLM.) The run opens when training begins, on TRL's main process only.

    To continue a run, call `train(resume_from_checkpoint=True)`, or load the run's newest version as the
    model. A script that starts from the base again raises a `ConfigError` at its first sync.

    TRL's settings of sampling must be those that its loss computes: any temperature, without top_p, top_k,
    min_p and penalties. Other settings raise a `ConfigError` when TRL's trainer is made. With a temperature
    other than 1, vLLM needs `--logprobs-mode processed_logprobs`; this is asked before the first rollout.

    Args:
        url: As for `Publisher`.
        base: As for `Publisher`.
        encoding, mirror, keep, allow_nonfinite, trust_remote_code, signing_key, on_version, fresh: As for
            `Publisher`.

    Raises:
        CompatibilityError: This release of TRL cannot be patched.
        ConfigError: An argument has a value that is not allowed.
    """

    def __init__(
        self,
        url: str,
        base: str | Path | None = None,
        *,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        keep: str | None = None,
        allow_nonfinite: bool = False,
        trust_remote_code: bool = False,
        signing_key: str | Path | None = None,
        on_version: Callable[[Manifest], object] | None = None,
        fresh: bool = False,
    ) -> None:
        hooks.TRANSFER.require()  # before TRL's modules are imported, which have moved in 1.18
        from delta_weight_sync.trl import patches

        arguments.check(
            url,
            base,
            encoding=encoding,
            mirror=mirror,
            keep=keep,
            state_minutes=0.0,
            on_version=on_version,
        )
        patches.install()
        self._open = functools.partial(
            Publisher,
            url,
            base,
            encoding=encoding,
            mirror=mirror,
            keep=keep,
            allow_nonfinite=allow_nonfinite,
            trust_remote_code=trust_remote_code,
            signing_key=signing_key,
            on_version=on_version,
            fresh=fresh,
        )
        self._url = url
        self._publisher: Publisher | None = None

    def __repr__(self) -> str:
        return f"<BucketWeightTransfer to {self._url}: {self._publisher or 'not open yet'}>"

    def metrics(self) -> "MetricsCallback":
        """Return a callback for the trainer's `callbacks`: it writes TRL's metrics into the run's log, which
        the dashboard draws. A failure there stops nothing."""
        from delta_weight_sync.callback import MetricsCallback  # imports transformers

        def log(metrics: Mapping[str, Any], step: int) -> None:
            if self._publisher:  # only on the main process, and only while the run is open
                self._publisher.log_metrics(metrics, step)

        return MetricsCallback(log)

    def init_weight_transfer(self) -> None:
        """Open the run; raises as `Publisher` does."""
        # TRL gathers sharded parameters itself, and calls this on its main process only.
        self._publisher = self._open(peers=Peers(alone=True))

    def pause(self) -> None:
        """Do nothing, because replicas commit by themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish TRL's parameters, whole tensors under checkpoint names.

        Returns when the changes are known, before they are uploaded. But version 0, and the version after a
        damaged one, are uploaded before this returns.
        """
        if self._publisher is None:  # in a second `train()` of a trainer, TRL does not open the run again
            self.init_weight_transfer()
        assert self._publisher is not None
        self._publisher.publish(iterator)

    def resume(self) -> None:
        """Do nothing, because replicas commit by themselves."""

    def destroy(self) -> None:
        """Publish what is pending, and close the run."""
        publisher = self._publisher
        self._publisher = None
        if publisher:
            with publisher:
                pass  # the end of the block flushes and closes
