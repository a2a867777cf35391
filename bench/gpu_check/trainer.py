"""Runs five steps of TRL's trainer on invented samples: bf16 autocast, fp32 masters, a sync per step."""

import contextlib
import logging
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bench.gpu_check.report import Row, Rows, ms
from delta_weight_sync import Publisher
from delta_weight_sync.publish.sharding import Weights
from delta_weight_sync.reader import open_run
from delta_weight_sync.trl import hooks, patches
from delta_weight_sync.trl.trainer import BucketGRPOTrainer
from tests.support import tiny_policy

_STEPS = 5
_BATCH = 8
_TOKENS = 200


class Samples:
    """A `RolloutWorkerProtocol` of TRL that has all samples from the start."""

    # ruff: noqa: D102 - TRL documents them

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        """Provide one batch more than there are steps, because TRL reads one batch ahead."""
        for number in range(_BATCH * (_STEPS + 1)):
            self.rollout_buffer.put(_sample(number))

    def inherit(self, sync: int) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


def _sample(number: int) -> RolloutSample:
    numbers = np.random.default_rng(number)
    asked = 4
    answered = _TOKENS - asked
    return RolloutSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=numbers.integers(5, 90, _TOKENS),
        completion_mask=np.array([0] * asked + [1] * answered),
        old_log_probs=np.array([0.0] * asked + [-3.0] * answered),
        advantage=float(numbers.standard_normal()),
        model_version=1,
        group_id=number,
        metrics={"reward": 1.0},
    )


def rows(device: torch.device) -> Rows:
    """For each place of the mirror: a row for the versions, one for their bits, one for the hand-over."""
    logging.disable(logging.WARNING)
    patches.install(hooks.EVERY_RANK)
    with tempfile.TemporaryDirectory() as folder:
        yield from _rows(Path(folder), device)


def _rows(folder: Path, device: torch.device) -> Rows:
    tiny_policy.build(folder / "base")
    url = f"{(folder / 'bucket').as_uri()}#run"
    handed = list[float]()
    for place in ("host", "device"):
        with Publisher(f"{url}-{place}", folder / "base", mirror=place) as publisher:

            def sync(weights: Weights, number: int, publisher: Publisher = publisher) -> None:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                publisher.publish(weights, number)
                handed.append(time.perf_counter() - started)

            with contextlib.redirect_stdout(None):
                trainer = _trained(folder, sync, device)
            publisher.flush()
            digest = publisher.digest(trainer.weights())
            newest = open_run(f"{url}-{place}").newest()
        assert newest is not None
        yield Row(f"{_STEPS} steps, mirror on the {place}", f"{newest.version} versions", newest.version >= 1)
        yield Row("the newest version equals the trainer's weights", right=newest.digest == digest)
        yield Row("hand-over: the first and the fastest", f"{ms(handed[0])}, {ms(min(handed))}")
        handed.clear()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    yield Row("peak memory of the card", f"{peak / 1e9:.2f} GB")


def _trained(folder: Path, sync: Any, device: torch.device) -> BucketGRPOTrainer:
    """Train as in `trainer/configs`: fp32 master weights, arithmetic in bf16."""
    on_gpu = device.type == "cuda"
    config = AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        dtype="float32",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=True,
        token_budget=0,
        max_steps=_STEPS,
        per_device_train_batch_size=_BATCH,
        learning_rate=1e-4,
        max_staleness=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = BucketGRPOTrainer(
        on_sync=sync,
        model=str(folder / "base"),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * _BATCH),
        reward_funcs=[lambda **_: []],
        rollout_worker=Samples(),
    )
    trainer.begin()
    return trainer
