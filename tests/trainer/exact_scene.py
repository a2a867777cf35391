"""A policy as TRL makes it, which takes steps and is published after each: for exact old policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from delta_weight_sync import Publisher, open_run
from delta_weight_sync.publish.past import Past
from delta_weight_sync.publish.trl_trainer import live_weights
from trainer.past_policy import LogProbs, PastPolicy, Query


def trl_model(folder: Path, dtype: str) -> torch.nn.Module:
    """What `AsyncGRPOTrainer` trains."""
    model = create_model_from_path(
        str(folder), device_map=None, attn_implementation=TREE_ATTENTION, dtype=dtype
    )
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@torch.no_grad()
def step(policy: torch.nn.Module, seed: int) -> None:
    """Moves a tenth of the weights, by a hundredth of their size."""
    generator = torch.Generator().manual_seed(seed)
    for weights in policy.parameters():
        moved = torch.rand(weights.shape, generator=generator) < 0.1
        change = 0.01 * torch.randn(weights.shape, generator=generator)
        weights += torch.where(moved, change, torch.zeros(())).to(weights.dtype)


def queries() -> list[Query]:
    """Samples of several lengths, two of which share a prompt."""
    numbers = np.random.default_rng(0)
    prompt = numbers.integers(5, 90, 6)
    found = []
    for length in (4, 9, 6):
        tokens = np.concatenate([prompt, numbers.integers(5, 90, length)])
        asked = np.arange(len(tokens)) >= len(prompt)
        asked[-2] = False
        found.append(Query(tokens, asked))
    return found


def from_checkout(url: str, sync: int, folder: Path, dtype: str, asked: list[Query]) -> LogProbs:
    """What a model says that is loaded from the checkpoint of that sync's version."""
    reader = open_run(url)
    manifest = next(manifest for manifest in reader.history() if manifest.sync == sync)
    reader.checkout(manifest, folder / f"v{manifest.version}")
    return PastPolicy(trl_model(folder / f"v{manifest.version}", dtype), 0).log_probs(asked)


class Published:
    """A policy that was published at each of the syncs 1 to `syncs`, and the same in the past."""

    def __init__(self, url: str, base: Path, syncs: int, keep: int, dtype: str, token_budget: int) -> None:
        policy = trl_model(base, dtype)
        step(policy, 1)  # so that float32 weights are no bf16, as where a trainer goes on
        self.past = PastPolicy(policy, token_budget)
        with Publisher(url, base) as publisher:
            publisher.publish(live_weights(policy))
            remembered: Past = publisher.remember(keep)
            self.past.begin(policy, remembered)
            for sync in range(2, syncs + 1):
                step(policy, sync)
                publisher.publish(live_weights(policy))
                publisher.flush()
                self.past.keep_up()
