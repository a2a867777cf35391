"""What exact old policies cost, beside snapshots in their place: `python -m bench.past`, some minutes.

Rolling: a model of SmolLM2-135M's shapes through syncs that change 1 % of its weights, against copying a bf16
snapshot of the same sync over it, in turns. Steps: TRL's own trainer with that model, whose samples were made
by one sync or by several; what exactness takes of a step, both measured in each step.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig

from bench import machine, timing
from bench.markdown import table
from bench.results import SCRATCH
from delta_weight_sync import open_bucket
from delta_weight_sync.codec import Patch
from delta_weight_sync.publish.past import Past
from delta_weight_sync.runlog import RunLogReader, StepEvent
from trainer import rollouts, train
from trainer.arguments import ScriptArguments
from trainer.policies import smollm2
from trainer.token_syncs import UNKNOWN, TracedSample

_KEPT, _ROUNDS, _STEPS, _BATCH, _PROMPT, _TOKENS = 16, 5, 3, 16, 40, 80


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    policy = smollm2.build(SCRATCH / "smollm2-4bit")
    print(machine.load(), _rolls(policy), _steps(policy), sep="\n\n")


def _rolls(policy: Path) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    total = sum(tensor.numel() for tensor in weights.values())
    past, numbers = Past(0, _KEPT), np.random.default_rng(0)
    for sync in range(1, _KEPT + 1):
        past.add(sync, [_moved(name, tensor.shape, numbers) for name, tensor in weights.items()])
    snapshot = {name: tensor.bfloat16() for name, tensor in weights.items()}
    written = past.roll(weights, _KEPT, _KEPT - 1)
    past.roll(weights, _KEPT - 1, _KEPT)

    spare = {name: tensor.clone() for name, tensor in weights.items()}
    competitors = {
        "back by 1 sync": lambda: past.roll(weights, _KEPT, _KEPT - 1),
        "a snapshot": lambda: [tensor.copy_(snapshot[name]) for name, tensor in spare.items()],
        "on by 1 sync": lambda: past.roll(weights, _KEPT - 1, _KEPT),
        "back by 16": lambda: past.roll(weights, _KEPT, 0),
        "on by 16": lambda: past.roll(weights, 0, _KEPT),
    }
    seconds = {name: min(all_) for name, all_ in timing.take_turns(competitors, _ROUNDS).items()}
    copy, snapshots = seconds["a snapshot"], _KEPT * 2 * total
    rows = [[name, f"{1e3 * s:.1f} ms", f"{s / copy:.2f}"] for name, s in seconds.items()]
    rows += [
        ["weights written per sync", f"{written / 1e6:.2f} M", f"{written / total:.4f}"],
        ["kept for 16 syncs", f"{past.nbytes / 1e6:.0f} MB", f"{past.nbytes / snapshots:.3f}"],
    ]
    return table(["135 M weights in float32, 1 % changed per sync", "", "of a snapshot"], rows)


def _moved(name: str, shape: torch.Size, numbers: np.random.Generator) -> Patch:
    index = np.flatnonzero(numbers.random(shape.numel()) < 0.01)
    return Patch(name, tuple(shape), index, numbers.choice([1, 0xFFFF], index.size).astype(np.uint16))


def _steps(policy: Path) -> str:
    rows = []
    for syncs in (1, 4):
        steps = _trained(policy, syncs)
        step, exact, written = (median(column) for column in zip(*steps, strict=True))
        rows.append(
            [str(syncs), f"{step:.2f} s", f"{exact:.2f} s", f"{exact / step:.2f}", f"{written / 1e6:.2f} M"]
        )
    head = ["syncs that made a batch", "forward, backward, AdamW", "exactness", "ratio", "weights written"]
    return table(head, rows)


def _trained(policy: Path, syncs: int) -> list[tuple[float, float, float]]:
    """Of each step: seconds without and for exactness, and how many weights rolling wrote."""
    folder = Path(tempfile.mkdtemp(prefix="past-", dir=SCRATCH))
    script = ScriptArguments(
        model=str(policy),
        bucket=folder.as_uri(),
        run="bench",
        replicas=[],
        task="shorter",
        exact_old_policy=True,
    )
    with mock.patch.object(rollouts, "make_worker", return_value=_Played(syncs)):
        train.train(script, _settings(folder))
    log = RunLogReader(open_bucket(folder.as_uri()), "bench").poll()
    shutil.rmtree(folder)
    steps = [event.metrics for event in log if isinstance(event, StepEvent)][syncs:-1]
    return [_figures(step) for step in steps]


def _figures(step: dict[str, float]) -> tuple[float, float, float]:
    without = step["perf/fwd_bwd_s"] + step["perf/optimizer_s"]
    return without, step["exact/seconds_total"], step["exact/weights_written_total"]


def _settings(folder: Path) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=_STEPS + 4,
        per_device_train_batch_size=_BATCH,
        token_budget=0,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_staleness=_KEPT,
    )


class _Played:
    """TRL's `RolloutWorkerProtocol`: after each sync a batch of random samples, of the newest `syncs`."""

    def __init__(self, syncs: int) -> None:
        self._syncs = syncs
        self.rollout_buffer: queue.Queue[TracedSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._numbers = np.random.default_rng(0)

    def start(self) -> None:
        """TRL looks a batch ahead."""
        self.update_model_version(1)

    def update_model_version(self, model_version: int) -> None:
        """Each sample is of one sync."""
        for number in range(_BATCH):
            sync = max(1, model_version - number % self._syncs)
            self.rollout_buffer.put(_sample(self._numbers.integers(5, 40_000, _TOKENS), sync, number // 8))

    def inherit(self, sync: int) -> None:
        """There was nobody before."""

    def stop(self) -> None:
        """Nothing runs."""

    def check_health(self, stale_after_s: float) -> None:
        """It is well."""


def _sample(tokens: np.ndarray, sync: int, group: int) -> TracedSample:
    answer = np.arange(_TOKENS) >= _PROMPT
    return TracedSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=tokens,
        completion_mask=answer.astype(np.int64),
        old_log_probs=np.where(answer, -10.0, 0.0).astype(np.float32),
        advantage=1.0 if group % 2 else -1.0,
        model_version=sync,
        group_id=group,
        metrics={"reward": 1.0},
        token_syncs=np.where(answer, sync, UNKNOWN),
    )


if __name__ == "__main__":
    main()
