"""TRL's trainer of asynchronous GRPO, which hands its weights over and can go on where another one was.

It uses internals of the release that `trl_patches.install` asks for.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

Named = Iterator[tuple[str, torch.Tensor]]
# Of transformers' TrainerState: what counts on, and what it compares with the settings.
_KEPT = ("global_step", "epoch", "total_flos", "num_input_tokens_seen")
_IN_PLAY = 4096  # prompts; more than TRL has at once
_COMPARED = ("train_batch_size", "logging_steps", "eval_steps", "save_steps")


@dataclass(frozen=True)
class Progress:
    """How far a trainer is: its weight syncs, its steps, and the prompts that it has trained on.

    Those are the first `prompts` of the data set, gone through again and again, and some `later` ones. Of the
    first, a few may have been dropped instead, as their samples were too old.
    """

    syncs: int
    trainer: dict[str, Any]
    prompts: int
    later: tuple[int, ...]


class TrainedGroups(set[int]):
    """The numbers of the prompts that were trained on. TRL counts when it packs a batch, one ahead of it."""

    def __init__(self, groups: Iterable[int]) -> None:
        super().__init__(groups)
        self._ahead: deque[set[int]] = deque()
        self._first, self._newest = 0, max(self, default=-1)

    def update(self, *batches: Iterable[int]) -> None:
        """Called by TRL for each batch that is packed."""
        self._ahead.extend(set(batch) for batch in batches)

    def position(self) -> tuple[int, tuple[int, ...]]:
        """The first prompt that may still be trained on, and those after it that were.

        One that is `_IN_PLAY` behind the newest was dropped: its samples were too old.
        """
        self._first = max(self._first, self._newest - _IN_PLAY)
        self._first = next(number for number in itertools.count(self._first) if number not in self)
        return self._first, tuple(n for n in range(self._first, self._newest + 1) if n in self)

    def trained(self, batches: int) -> None:
        """Training has taken this many of them."""
        for _ in range(min(batches, len(self._ahead))):
            super().update(batch := self._ahead.popleft())
            self._newest = max(batch | {self._newest})


class BucketGRPOTrainer(AsyncGRPOTrainer):
    """Calls `hand_over` on every rank at each sync, with every parameter as it lies there, and its number.

    TRL leaves frozen parameters out, gathers each sharded one in full, and keeps the `weight_transfer` of the
    main rank only. Ends when TRL hands a `WeightTransferProtocol` the parameters as they are, on all ranks.
    """

    def __init__(
        self,
        *,
        hand_over: Callable[[Named, int], None],
        begun: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        """`begun`: how far an earlier trainer came, whose weights are put back when training begins."""
        super().__init__(weight_transfer=_Nowhere(), **kwargs)
        self._hand_over, self._begun = hand_over, begun
        groups = (*range(begun.prompts), *begun.later) if begun else ()
        self._trained_groups = self.groups = TrainedGroups(groups)
        self._last_groups_trained = len(self.groups)
        if begun:
            self.model_version = begun.syncs - 1  # TRL's first sync hands the same weights over once more

    def begin(self) -> None:
        """Train, or go on: as from a checkpoint of TRL's, of which there is only what is no weight."""
        if self._begun is None:
            self.train()
            return
        with tempfile.TemporaryDirectory() as folder:
            TrainerState(**self._begun.trainer).save_to_json(f"{folder}/{TRAINER_STATE_NAME}")
            rollouts = {"prompt_index": 0, "model_version": self.model_version}
            Path(folder, "rollout_state.json").write_text(json.dumps(rollouts))
            self.train(resume_from_checkpoint=folder)

    def progress(self) -> Progress:
        """How far this trainer is."""
        kept = {name: getattr(self.state, name) for name in (*_KEPT, *_COMPARED)}
        return Progress(self.model_version, kept, *self.groups.position())

    def _load_from_checkpoint(self, *_: Any) -> None:
        """The weights come from the bucket."""

    def weights(self) -> Named:
        """Every parameter of the policy."""
        return named_weights(self.accelerator.unwrap_model(self.model))

    def _streaming_iter(self) -> Named:
        # At each sync TRL takes this to its end on every rank, and on the main one gives it to `_Nowhere`.
        self._hand_over(self.weights(), self.model_version + 1)
        yield from ()


class _Nowhere:
    """TRL's `WeightTransferProtocol` for a trainer whose weights take another way."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Named) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def named_weights(model: torch.nn.Module) -> Named:
    """Every parameter under its checkpoint name, frozen ones too; of LoRA, what its adapters merge into."""
    if async_grpo_trainer.is_peft_model(model):
        yield from async_grpo_trainer._iter_vllm_named_params(model)
    else:
        yield from live_weights(model)


def live_weights(model: torch.nn.Module) -> Named:
    """Every parameter as it is, under its checkpoint name if it is of a checkpoint."""
    for name, parameter in model.named_parameters():
        # What DDP and gradient checkpointing put around modules is no part of a checkpoint.
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter
