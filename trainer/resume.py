"""Resumes a run from the newest state in its bucket, and saves states there.

Both classes are callbacks of TRL's trainer. One of TRL's own callbacks publishes the weights when training
begins. `Restore` must run before that callback, so the trainer is built with `Restore`. `SaveState` must
run after that callback, so `train` adds it later.
"""

import dataclasses
from typing import Any

from transformers import TrainerCallback

from delta_weight_sync import Publisher
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.state_contents import load_random_state, snapshot_random_state
from delta_weight_sync.records import Manifest
from delta_weight_sync.trl.trainer import BucketGRPOTrainer, Progress


def find_progress(publisher: Publisher, *, fresh: bool) -> Progress | None:
    """Find how far an earlier trainer of the run came. Returns None for a new run, or if `fresh`.

    Raises `StateError` if the run has versions after version 0 but no state, or if another program saved the
    state.
    """
    if fresh or (record := publisher.find_state()) is None:
        return None
    try:
        return Progress(**record.extra)
    except TypeError as error:
        problem = f"another program saved the state of version {record.version}"
        raise StateError(f"{problem}: start again (`--fresh`)") from error


class Restore(TrainerCallback):
    """Restores the state before TRL's first sync. Restores the random generators again before the first step,
    because TRL may draw random numbers in between."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._random_state: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._publisher.resumed_from:
            self._publisher.restore(kwargs["model"], kwargs["optimizer"], schedule=kwargs["lr_scheduler"])
            self._random_state = snapshot_random_state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._random_state:
            load_random_state(self._random_state)
            self._random_state = None


class SaveState(TrainerCallback):
    """Saves the trainer's state after the first sync of a run, from time to time, and at the end.

    From one state to the next, at least `every` syncs and the publisher's `state_minutes` pass (more minutes
    after a slow upload). Only the state at the end does not wait. If `every` is 0, no state is saved.

    A state belongs to a version. So the steps after the last sync are published before the state at the end
    is saved.
    """

    def __init__(self, publisher: Publisher, trainer: BucketGRPOTrainer, every: int) -> None:
        self._publisher = publisher
        self._trainer = trainer
        self._every = every
        self._syncs = 0  # number of syncs since the last saved state; 0 means that no state is due
        self._synced = False  # whether the weights are those of the last sync
        self._in_step = True  # whether the weights may be in the middle of a step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._synced = True
        if self._publisher.resumed_from is None:
            self._syncs = 1
            self._save()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._synced = False
        self._in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.groups.trained(args.gradient_accumulation_steps)
        self._synced = state.global_step % args.weight_sync_steps == 0
        self._in_step = False
        self._syncs += self._synced  # if TRL has made a sync after this step
        if self._syncs >= self._every:
            self._save()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._sync()  # publishes the steps after the last sync

    def finish(self, timeout_s: float = 600.0) -> Manifest:
        """Publish what is pending, and start to save the last state. Returns the newest manifest.
        Raises `TimeoutError`, or the `DeltaWeightSyncError` that stopped the publisher."""
        self._sync()  # a signal between two steps ends training without `on_train_end`
        newest = self._publisher.flush(timeout_s)
        self._save(final=True)
        return newest

    @property
    def saved(self) -> bool:
        """Whether the present state was uploaded, or is being uploaded. False in the middle of a step."""
        return self._synced and not self._syncs and self._publisher.state_failure is None

    def _sync(self) -> None:
        if not (self._synced or self._in_step):
            self._synced = True
            self._syncs += 1
            self._trainer.sync()

    def _save(self, *, final: bool = False) -> None:
        """Save the state of the last sync, unless it is saved. `final`: do not wait for `state_minutes`."""
        if self._every and self._synced and self._syncs:
            live = self._trainer.callback_handler
            extra = dataclasses.asdict(self._trainer.progress())
            state = {"extra": extra, "final": final, "schedule": live.lr_scheduler}
            if self._publisher.save_state(live.model, live.optimizer, **state):
                self._syncs = 0
