"""What can be trained on: the prompts, and who rewards the answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig

from trainer import reverse_text, shorter, wordle
from trainer.arguments import ScriptArguments


@dataclass(frozen=True)
class Task:
    """Answers are rewarded by functions, or by the environment in which they are given."""

    dataset: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    environment: Callable[[], object] | None = None


def make_task(script: ScriptArguments, args: AsyncGRPOConfig) -> Task:
    """The task of the settings; SystemExit where they name none."""
    batch = args.per_device_train_batch_size * args.world_size
    prompts = max(args.max_steps * batch // args.num_generations, 1)
    if script.task == "shorter":
        return Task(shorter.make_dataset(), [shorter.reward_shorter])
    if script.task == "reverse_text":
        return Task(_reverse_text(script.model, prompts, args.seed), [reverse_text.reward_reversed])
    if script.task == "wordle" and script.env_url:
        environment = functools.partial(wordle.WordleEnv, script.env_url)
        return Task(wordle.make_dataset(script.prompt, prompts, args.seed), [], environment)
    raise SystemExit(
        "--task must be 'shorter', 'reverse_text', or 'wordle' with --env_url <URL of the Wordle Space>"
    )


def _reverse_text(model: str, prompts: int, seed: int) -> Dataset:
    try:
        return reverse_text.make_dataset(AutoTokenizer.from_pretrained(model), prompts, seed)
    except ValueError as error:
        raise SystemExit(f"--task reverse_text: {error}") from None
