"""The sanity task of the original work: shorter answers are better, the best is an immediate end of turn.

It needs no environment and any chat model can learn it, so it shows that gradients reach the replicas.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

SCALE = 64  # tokens at which the reward reaches zero

_PLACES = ("France", "Japan", "Brazil", "Kenya", "Canada", "India", "Norway", "Chile")


def reward_shorter(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 minus the share of `SCALE` tokens that each completion used, at least 0."""
    return [max(0.0, 1.0 - (len(ids) - 1) / SCALE) for ids in completion_ids]


def make_dataset() -> Dataset:
    """Questions of one kind, so that the reward of a step does not depend on which it drew."""
    rows = [f"What is the capital of {place}?" for place in _PLACES]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": row}] for row in rows]})
