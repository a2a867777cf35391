"""Ordinary callbacks for any `transformers.Trainer`: they log its metrics, and publish its weights."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from delta_weight_sync.publish.publisher import Publisher

__all__ = ["PublishCallback"]


class MetricsCallback(TrainerCallback):
    """Writes a trainer's metrics into a run's log.

    Args:
        log: Takes metrics and their step, as `Publisher.log_metrics` does, which raises nothing.
    """

    def __init__(self, log: Callable[[Mapping[str, Any], int], None]) -> None:
        self._log = log

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Write the metrics."""
        self._log(logs or {}, state.global_step)


class PublishCallback(MetricsCallback):
    """Publishes a trainer's weights as versions: when training begins, and after each optimizer step.

        with Publisher("hf://buckets/me/short#first", base="Qwen/Qwen3-0.6B") as publisher:
            SFTTrainer("Qwen/Qwen3-0.6B", ..., callbacks=[PublishCallback(publisher)]).train()

    Works with every `transformers.Trainer`, such as TRL's for SFT, DPO and synchronous GRPO. The sync of a
    version is the trainer's `global_step`. Steps that only accumulate gradients publish nothing, nor does an
    evaluation. The trainer's metrics go into the run's log. When `train` returns, the newest version is in
    the bucket. With several processes, create the publisher and the callback in each one.

    A trainer that resumes from its own checkpoint begins with a version of the checkpoint's weights. If the
    run was ahead of this checkpoint, replicas go back with the trainer.

    Args:
        publisher: Publishes the weights. Close it after training, for example by its `with` block.
    """

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher.log_metrics)
        self._publisher = publisher

    def __repr__(self) -> str:
        return f"<PublishCallback of {self._publisher}>"

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Publish the weights with which training begins; raises as `Publisher.publish` does."""
        self._publisher.publish(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Publish the weights after an optimizer step; raises as `Publisher.publish` does."""
        self._publisher.publish(model, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Wait until the newest version is in the bucket; raises as `Publisher.flush` does."""
        self._publisher.flush()
