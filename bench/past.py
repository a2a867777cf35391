"""What exact old policies cost, beside snapshots in their place: `python -m bench.past`, some minutes.

With SmolLM2-135M in float32, on one thread, in processor seconds. Rolling: through syncs that change 1 % of
the weights, against copying a bf16 snapshot of a sync over them. Steps: forward, backward and AdamW of TRL's
model for a batch, against making its log-probabilities exact where one sync or several have made it.
"""

import contextlib
import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from bench import machine, timing
from bench.results import SCRATCH
from bench.tables import table
from delta_weight_sync.codec import Patch
from delta_weight_sync.publish.undo import UndoLog
from delta_weight_sync.trl import patches as patches_module
from delta_weight_sync.trl.trainer import live_weights
from trainer.exact import ExactSamples, PastPolicy, forward, query
from trainer.policies import smollm2
from trainer.rollouts import UNKNOWN, TracedSample

_SYNCS, _ROUNDS = 16, 5
_BATCH, _PROMPT, _TOKENS = 16, 40, 80
_NUMBERS = np.random.default_rng(0)


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    patches_module.install()
    register_tree_attention()
    folder = smollm2.build(SCRATCH / "smollm2-4bit")
    policy = create_model_from_path(
        str(folder), device_map=None, attn_implementation=TREE_ATTENTION, dtype="float32"
    )
    add_fused_lm_head(policy)
    changes = _changes(policy)
    print(f"load {machine.load()}", _rolls(policy, changes), _steps(policy, changes), sep="\n\n")


def _changes(policy: torch.nn.Module) -> list[list[Patch]]:
    return [[_moved(name, p.shape) for name, p in live_weights(policy)] for _ in range(_SYNCS)]


def _moved(name: str, shape: torch.Size) -> Patch:
    index = np.flatnonzero(_NUMBERS.random(shape.numel()) < 0.01)
    return Patch(name, tuple(shape), index, _NUMBERS.choice([1, 0xFFFF], index.size).astype(np.uint16))


def _past(changes: list[list[Patch]]) -> UndoLog:
    past = UndoLog(0, _SYNCS)
    for sync, patches in enumerate(changes, start=1):
        past.add(sync, patches)
    return past


def _rolls(policy: torch.nn.Module, changes: list[list[Patch]]) -> str:
    past = _past(changes)
    weights, over = ({name: p.detach().clone() for name, p in live_weights(policy)} for _ in range(2))
    snapshot = {name: tensor.bfloat16() for name, tensor in weights.items()}
    total = sum(tensor.numel() for tensor in weights.values())
    works = {
        "back by 1 sync": lambda: past.roll(weights, _SYNCS, _SYNCS - 1),
        "a snapshot": lambda: [tensor.copy_(snapshot[name]) for name, tensor in over.items()],
        "on by 1 sync": lambda: past.roll(weights, _SYNCS - 1, _SYNCS),
        "back by 16": lambda: past.roll(weights, _SYNCS, 0),
        "on by 16": lambda: past.roll(weights, 0, _SYNCS),
    }
    seconds = {name: min(all_) for name, all_ in timing.take_turns(works, _ROUNDS).items()}
    rows = [[name, f"{1e3 * s:.0f} ms", f"{s / seconds['a snapshot']:.2f}"] for name, s in seconds.items()]
    written = past.roll(weights, _SYNCS, _SYNCS - 1)
    size = sum(c.positions.nbytes + c.ulps.nbytes for step in past._steps for c in step)
    rows += [
        ["weights written by 1 sync", f"{written / 1e6:.2f} M", f"{written / total:.4f}"],
        ["kept for 16 syncs", f"{size / 1e6:.0f} MB", f"{size / (_SYNCS * 2 * total):.3f}"],
    ]
    return table(["a roll", "", "of a snapshot, or of 16"], rows)


def _steps(policy: torch.nn.Module, changes: list[list[Patch]]) -> str:
    past = UndoLog(0, _SYNCS)
    old = PastPolicy(policy, 0)
    old.begin(policy, past)
    for sync, patches in enumerate(changes, start=1):
        past.add(sync, patches)
    step = "forward, backward and AdamW"
    works: dict[str, timing.Work] = {step: _Step(policy)}
    for syncs in (1, 2, 4):
        works[f"exact, made by {syncs}"] = lambda syncs=syncs: _exact(old, syncs)
    seconds = {name: min(all_) for name, all_ in timing.take_turns(works, 2).items()}
    rows = [[name, f"{s:.2f} s", f"{s / seconds[step]:.2f}"] for name, s in seconds.items()]
    return table(["a batch of 16 samples of 80 tokens, half of them an answer", "", "of a step"], rows)


class _Step:
    def __init__(self, policy: torch.nn.Module) -> None:
        self._policy, self._optimizer = policy, torch.optim.AdamW(policy.parameters(), lr=1e-9)
        self._row = TreeRow()
        for sample in _samples(1):
            self._row.add(query(sample.input_ids, sample.completion_mask == 1))

    def __call__(self) -> None:
        forward(self._policy, self._row.pack()).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _exact(old: PastPolicy, syncs: int) -> None:
    waiting: queue.Queue[TracedSample] = queue.Queue()
    for sample in _samples(syncs):
        waiting.put(sample)
    accelerator = SimpleNamespace(autocast=contextlib.nullcontext)
    batch = SimpleNamespace(per_device_train_batch_size=_BATCH)
    metrics = {"train": defaultdict[str, list[float]](list)}
    trainer: Any = SimpleNamespace(_metrics=metrics, accelerator=accelerator, args=batch)
    publisher: Any = None  # used only when training begins
    ExactSamples(waiting, old, trainer, publisher).get()


def _samples(syncs: int) -> list[TracedSample]:
    """Each of one of the newest `syncs`."""
    return [_sample(_SYNCS - number % syncs) for number in range(_BATCH)]


def _sample(sync: int) -> TracedSample:
    answer = np.arange(_TOKENS) >= _PROMPT
    return TracedSample(
        prompt=[],
        completion=[],
        input_ids=_NUMBERS.integers(5, 40_000, _TOKENS),
        completion_mask=answer.astype(np.int64),
        old_log_probs=np.where(answer, -10.0, 0.0).astype(np.float32),
        advantage=1.0,
        model_version=sync,
        group_id=0,
        metrics={},
        token_syncs=np.where(answer, sync, UNKNOWN),
    )


if __name__ == "__main__":
    main()
