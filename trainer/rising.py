"""A trainer that goes on where the one before it ended: what is put back at the start, and what is kept.

Two of TRL's callbacks, because TRL hands the weights over in between: `PutBack` is the first of all, `Keep`
the last but one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback

from delta_weight_sync import Publisher
from delta_weight_sync.publish import random_state
from delta_weight_sync.publish.optimizer_state import StateError
from delta_weight_sync.publish.trl_trainer import BucketGRPOTrainer, Progress, live_weights


def progress(publisher: Publisher, *, fresh: bool) -> Progress | None:
    """How far an earlier trainer of the run came, which is gone on from; None for one that begins.

    Raises `StateError` if there were trainers, and yet nothing to go on from.
    """
    record = None if fresh else publisher.find_state()
    try:
        return Progress(**record.extra) if record else None
    except TypeError as error:
        raise StateError(
            f"the state of version {record.version} is not one of this trainer: begin again (`--fresh`)"
        ) from error


class PutBack(TrainerCallback):
    """Puts the state back before TRL's first sync, and the random numbers before the first step."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._numbers: tuple[Any, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kept: Any) -> None:
        """Weights, optimizer and schedule."""
        if self._publisher.state:
            self._publisher.restore(live_weights(kept["model"]), kept["optimizer"], **_others(kept))
            self._numbers = random_state.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """TRL has drawn some to set its data up, which the trainer before had done long ago."""
        if self._numbers:
            random_state.put(*self._numbers)
            self._numbers = None


class Keep(TrainerCallback):
    """Keeps the trainer's state in the bucket: of the first sync, and from then on every so many."""

    def __init__(self, publisher: Publisher, trainer: BucketGRPOTrainer, every: int) -> None:
        self._publisher, self._trainer, self._every = publisher, trainer, every
        self._since = 0  # syncs since the state that is kept
        self._current = False  # the weights are those that were handed over last

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After TRL's first sync."""
        if self._publisher.state is None:
            self._current, self._since = True, 1
            self.keep()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here on they are not."""
        self._current = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After TRL's sync, if this step has one."""
        self._trainer.groups.trained(args.gradient_accumulation_steps)
        self._current = state.global_step % args.weight_sync_steps == 0
        self._since += self._current
        if self._since >= self._every:
            self.keep()

    def keep(self) -> None:
        """Copy the state of now, if it is that of a sync, is not kept yet, and no other is on its way."""
        if self._current and self._since:
            kept = vars(self._trainer.callback_handler)
            weights, extra = live_weights(kept["model"]), dataclasses.asdict(self._trainer.progress())
            if self._publisher.save_state(weights, kept["optimizer"], extra=extra, **_others(kept)):
                self._since = 0


def _others(kept: dict[str, Any]) -> dict[str, Any]:
    return {"schedule": kept["lr_scheduler"]}
