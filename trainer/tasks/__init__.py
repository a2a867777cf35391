"""Tasks: each has prompts to train on, and functions or an environment that reward the answers.

To add a task, write a module here with a function `make_task(settings, prompts, seed)`, and add its name to
`settings.TASKS`. `prompts` is the number of prompts that the run trains on. A task may return fewer
prompts: the run then repeats them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from trainer.settings import TASKS, Settings

_UNLIMITED = 1_000  # steps after which a run without a limit of steps repeats its prompts


@dataclass(frozen=True)
class Task:
    """Prompts, and the functions or the environment that reward answers to them.

    An environment may have two more attributes. A conversation also ends when `done` becomes true. `rates`
    counts what happened, read at the end of the conversation: name -> (how often, of how many). The log of
    the run gets each rate, over all conversations since the last step.
    """

    dataset: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    environment: Callable[[], object] | None = None


def make_task(settings: Settings, config: Any) -> Task:
    """Build the task that the settings name, for TRL's `config`. Raises `SystemExit` for a wrong setting."""
    if settings.task not in TASKS:
        raise SystemExit(f"--task must be one of {', '.join(TASKS)}; it is {settings.task!r}")
    batch = config.per_device_train_batch_size * config.world_size * config.gradient_accumulation_steps
    steps = config.max_steps if config.max_steps > 0 else _UNLIMITED
    prompts = max(steps * batch // config.num_generations, 1)
    module = importlib.import_module(f"trainer.tasks.{settings.task}")
    task: Task = module.make_task(settings, prompts, config.seed)
    return task
