"""Brevity: shorter answers earn more, and an empty answer earns most.

The task needs no environment, and any chat model can learn it. Use it to check that replicas receive what the
trainer learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasets import Dataset

from trainer.settings import Settings
from trainer.tasks import Task

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOConfig

SCALE = 64  # tokens at which the reward reaches zero
_COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Canada", "India", "Norway", "Chile")


def reward_brevity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward falls from 1 for an empty completion to 0 for one of `SCALE` tokens or more."""
    return [max(0.0, 1.0 - (len(ids) - 1) / SCALE) for ids in completion_ids]


def make_dataset() -> Dataset:
    """Questions of the same kind, so that a step's reward does not depend on which of them it uses."""
    questions = [f"What is the capital of {country}?" for country in _COUNTRIES]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]})


def make_task(settings: Settings, config: AsyncGRPOConfig) -> Task:
    return Task(make_dataset(), [reward_brevity])
