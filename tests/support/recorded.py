"""A rollout worker whose samples are known beforehand; it needs TRL, and nothing of the trainer."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

if TYPE_CHECKING:
    from delta_weight_sync.trl.trainer import Progress

BATCH = 8


class Recorded:
    """TRL's `RolloutWorkerProtocol`: the samples from the first one on that was not trained on."""

    def __init__(self, steps: int, begun: Progress | None) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        self._first = begun.prompts if begun else 0
        self._last = self._first + BATCH * ranks * (steps + 1)  # TRL looks a batch ahead
        assert not (begun and begun.later), "they were taken in order"
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        for number in range(self._first, self._last):
            self.rollout_buffer.put(sample(number))

    def inherit(self, sync: int) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


def sample(number: int) -> RolloutSample:
    numbers = np.random.default_rng(number)
    return RolloutSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=numbers.integers(5, 90, 12),
        completion_mask=np.array([0] * 4 + [1] * 8),
        old_log_probs=np.array([0.0] * 4 + [-3.0] * 8),
        advantage=float(numbers.standard_normal()),
        model_version=1,
        group_id=number,
        metrics={"reward": 1.0},
    )


def cpu_config(folder: Path, **options: Any) -> AsyncGRPOConfig:
    """TRL's settings for a trainer on a CPU that writes nothing but its run."""
    on_cpu = {"dtype": "float32", "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    return AsyncGRPOConfig(output_dir=str(folder), token_budget=0, **(on_cpu | quiet | options))
