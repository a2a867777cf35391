"""The settings of `python -m trainer.train`, in addition to those of TRL's `AsyncGRPOConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish.mirror import Place
from trainer.tasks import TASKS, wordle


def _option(default: Any, help_text: str) -> Any:
    return field(metadata={"help": help_text}, default=default)


@dataclass(frozen=True)
class Settings:
    """Command line options and keys of a configuration file; see `trainer/configs/`."""

    model: str = field(metadata={"help": "Base policy: a Hub id or the folder of a checkpoint."})
    bucket: str = field(
        metadata={"help": "hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>"}
    )
    run: str = field(
        metadata={"help": "Name of the run. Its objects are stored below runs/<run>/ in the bucket."}
    )
    replicas: list[str] = field(metadata={"help": "URLs of the vLLM replicas."})
    task: str = _option("wordle", f"What to train on: {', '.join(TASKS)}.")
    env_url: str = _option("", "URL of the Wordle Space (task 'wordle').")
    prompt: str = _option(wordle.PROMPT, "Prompt of each game (task 'wordle').")
    encoding: Encoding = field(default="fast", metadata={"help": "Encoding of deltas."})
    mirror: Place = field(default="host", metadata={"help": "Memory that holds the published bits."})
    keep: str = _option(
        "", "How much of the run stays in the bucket, such as '20GB' or '7d'; by default all."
    )
    state_every: int = _option(20, "Syncs between two saved states; a trainer that dies loses at most these.")
    canary_s: float = _option(
        0.0,
        "Minimum seconds between two comparisons of the replicas' logprobs with those of the published"
        " weights; 0 turns the canary off. It takes 4 bytes of host memory per weight.",
    )
    norm_learning_rate: float = _option(0.0, "Learning rate of norms and biases; 0 for --learning_rate.")
    minutes: float = _option(0.0, "Stop after this many minutes and publish everything; 0 for no limit.")
    fresh: bool = _option(False, "Start again from --model instead of resuming the run.")
    exact_old_policy: bool = _option(False, "Compute old log-probabilities with each token's exact weights.")

    def __post_init__(self) -> None:
        for option, least in (("minutes", 0), ("norm_learning_rate", 0), ("state_every", 1), ("canary_s", 0)):
            if (number := getattr(self, option)) < least:
                raise SystemExit(f"--{option} must be at least {least}; it is {number}")
