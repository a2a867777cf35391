"""Brevity: shorter answers earn more, and an empty answer earns most.

The task needs no environment, and any chat model can learn it. Use it to check that replicas receive what the
trainer learns.
"""

from typing import Any

from datasets import Dataset

from trainer.settings import Settings
from trainer.tasks import Task

SCALE = 64  # tokens at which the reward reaches zero
_COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Canada", "India", "Norway", "Chile")


def reward_brevity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward falls from 1 for an empty answer to 0 for `SCALE` tokens. The end token does not count."""
    return [max(0.0, 1.0 - (len(ids) - 1) / SCALE) for ids in completion_ids]


def make_task(settings: Settings, prompts: int, seed: int) -> Task:
    # All questions are of the same kind, so that a step's reward does not depend on its questions.
    questions = [f"What is the capital of {country}?" for country in _COUNTRIES]
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]})
    return Task(dataset, [reward_brevity])
