"""A subclass of TRL's `AsyncGRPOTrainer` that publishes its weights and resumes from a saved state.

It uses TRL internals; `hooks.EVERY_RANK` names most of them.
"""

import itertools
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl.experimental.async_grpo import AsyncGRPOTrainer

from delta_weight_sync.publish.publisher import Model, checkpoint_weights

Named = Iterable[tuple[str, torch.Tensor]]
_IN_PLAY = 4096  # exceeds the number of prompts that TRL works on at the same time
# Fields of TrainerState: transformers restores `_KEPT`, and compares `_COMPARED` with the settings.
_KEPT = ("global_step", "epoch", "total_flos", "num_input_tokens_seen")
_COMPARED = ("train_batch_size", "logging_steps", "eval_steps", "save_steps")


@dataclass(frozen=True)
class Progress:
    """How far a trainer is: its weight syncs, its steps, and the prompts that it has finished.

    Prompts are numbered through all repetitions of the data set. Prompts below `prompts`, and those in
    `later`, are finished: they were trained on, or dropped because their samples were too old.
    """

    syncs: int
    trainer: dict[str, Any]
    prompts: int
    later: tuple[int, ...]


class TrainedGroups(set[int]):
    """The numbers of the prompts that were trained on; a *group* is the samples of one prompt. TRL packs a
    batch before it trains on it. So `packed` only queues the batch's prompts, until `trained` is called
    after a step."""

    def __init__(self, groups: Iterable[int]) -> None:
        super().__init__(groups)
        self._ahead: deque[set[int]] = deque()
        self._first = 0
        self._newest = max(self, default=-1)

    def packed(self, batch: Iterable[int]) -> None:
        """Queue the prompts of a batch until `trained` counts them."""
        self._ahead.append(set(batch))

    def position(self) -> tuple[int, tuple[int, ...]]:
        """Return the first prompt that was not trained on yet, and all later prompts that were.

        A prompt more than `_IN_PLAY` behind the newest counts as dropped, because its samples were too old.
        """
        self._first = max(self._first, self._newest - _IN_PLAY)
        self._first = next(number for number in itertools.count(self._first) if number not in self)
        return self._first, tuple(n for n in range(self._first, self._newest + 1) if n in self)

    def trained(self, batches: int) -> None:
        """Count the prompts of the next `batches` batches as trained on."""
        for _ in range(min(batches, len(self._ahead))):
            self.update(batch := self._ahead.popleft())
            self._newest = max(batch | {self._newest})


class BucketGRPOTrainer(AsyncGRPOTrainer):
    """Calls `on_sync` on every rank at each sync, with the policy as that rank holds it.

    TRL itself skips frozen parameters, gathers sharded parameters, and calls `weight_transfer` only on the
    main rank. So this class overrides `_streaming_iter`. Remove this override once TRL hands each rank's
    parameters to `WeightTransferProtocol` (upstream/trl/0001). The class would then only resume.

    Args:
        on_sync: Called with what `weights` returns and the sync's number, which is right only on rank 0.
        resumed_from: The progress of an earlier trainer, from which training continues.
        **kwargs: Arguments of TRL's trainer.
    """

    def __init__(
        self, *, on_sync: Callable[[Model, int], None], resumed_from: Progress | None = None, **kwargs: Any
    ) -> None:
        args = kwargs["args"]
        epochs = args.num_train_epochs if args.max_steps <= 0 else 0  # TRL will set `max_steps`
        super().__init__(weight_transfer=object(), **kwargs)  # with any object, TRL makes no vLLM client
        self.weight_transfer = None  # now TRL iterates over `_streaming_iter` by itself, on every rank
        self._on_sync = on_sync
        self._resumed_from = resumed_from
        groups = (*range(resumed_from.prompts), *resumed_from.later) if resumed_from else ()
        self.groups = TrainedGroups(groups)
        if resumed_from:
            self.model_version = resumed_from.syncs - 1  # TRL begins with a sync, which repeats the last one
            if epochs:
                self.add_callback(_EpochsEnd(self, math.ceil(epochs * len(kwargs["train_dataset"]))))

    def begin(self) -> None:
        """Train until the end, after `resumed_from` if that is set."""
        if self._resumed_from is None:
            self.train()
            return
        # TRL resumes only from a folder. This folder has the progress; the state in the bucket has all else.
        with tempfile.TemporaryDirectory() as folder:
            TrainerState(**self._resumed_from.trainer).save_to_json(f"{folder}/{TRAINER_STATE_NAME}")
            self.train(resume_from_checkpoint=folder)

    def progress(self) -> Progress:
        """Return the progress of this trainer."""
        kept = {name: getattr(self.state, name) for name in (*_KEPT, *_COMPARED)}
        return Progress(self.model_version, kept, *self.groups.position())

    def sync(self) -> None:
        """Publish outside of TRL's loop, as after a sync in it. Only rank 0 counts syncs."""
        self._on_sync(self.weights(), self.model_version + 1)
        if self.accelerator.is_main_process:
            self.model_version += 1
            self.rollout_worker.update_model_version(self.model_version)

    def get_train_dataloader(self) -> Any:
        """TRL's batches; notes the prompts of each in `groups`."""
        batches = super().get_train_dataloader()
        if self.accelerator.is_main_process:
            loader = getattr(batches, "base_dataloader", batches)  # accelerate's object asks this one
            pack = loader.collate_fn

            def packed(rows: list[list[Any]]) -> Any:
                (ranks,) = rows  # TRL packs a row for each rank
                self.groups.packed(sample["group_id"] for row in ranks for sample in row.samples)
                return pack(rows)

            loader.collate_fn = packed
        return batches

    def _load_from_checkpoint(self, *_: Any) -> None:
        """Load nothing: the weights come from the bucket."""

    def weights(self) -> Model:
        """Return what to publish: the policy, with its buffers and frozen parameters."""
        model: torch.nn.Module = self.accelerator.unwrap_model(self.model)
        return model

    def _streaming_iter(self) -> Named:
        self._on_sync(self.weights(), self.model_version + 1)
        yield from ()  # TRL iterates over the result; nothing is left to send


class _EpochsEnd(TrainerCallback):
    """Ends training on all ranks once `prompts` were trained on, also by earlier trainers. TRL counts only
    those of this trainer."""

    def __init__(self, trainer: BucketGRPOTrainer, prompts: int) -> None:
        self._trainer = trainer
        self._prompts = prompts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator = self._trainer.accelerator
        done = torch.tensor(int(len(self._trainer.groups) >= self._prompts), device=accelerator.device)
        if accelerator.reduce(done, reduction="sum").item():  # only the main rank counts
            control.should_training_stop = True


def live_weights(model: torch.nn.Module) -> Named:
    """Return every parameter as this rank holds it, under its checkpoint name."""
    return checkpoint_weights(model.named_parameters())
