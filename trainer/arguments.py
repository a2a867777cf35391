"""The settings of the training script, beside those of TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish.mirror import Place
from trainer import wordle


@dataclass(frozen=True)
class ScriptArguments:
    """Where everything is. All of it is URLs and names; nothing is shared but these."""

    model: str = field(metadata={"help": "The base policy: a Hub id or the folder of a checkpoint."})
    bucket: str = field(
        metadata={"help": "hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>"}
    )
    run: str = field(metadata={"help": "Name of the run; its objects are below runs/<run>/ in the bucket."})
    replicas: list[str] = field(metadata={"help": "URLs of the vLLM Spaces."})
    task: str = field(default="wordle", metadata={"help": "'wordle', 'reverse_text' or 'shorter'."})
    env_url: str = field(default="", metadata={"help": "URL of the Wordle Space (task 'wordle')."})
    prompt: str = field(default=wordle.PROMPT, metadata={"help": "What the policy is told (task 'wordle')."})
    encoding: str = field(default="fast", metadata={"help": "Of deltas: 'fast', 'small' or 'original'."})
    mirror: str = field(
        default="host", metadata={"help": "Where the published bits are kept: 'host' or 'device'."}
    )
    keep: str = field(
        default="", metadata={"help": "Of the run in the bucket: '20GB', '7d' or, by default, all of it."}
    )
    state_every: int = field(
        default=20,
        metadata={"help": "Syncs between two states; so much is lost at most when the trainer dies."},
    )
    canary_s: float = field(
        default=10.0,
        metadata={
            "help": "Seconds between two comparisons of the replicas' logprobs with those of the published"
            " weights, at least; 0 for none. They take 4 bytes of memory per weight on the host."
        },
    )
    norm_learning_rate: float = field(
        default=0.0,
        metadata={"help": "Of the norms' scales and of biases; 0 for --learning_rate, as all weights have."},
    )
    minutes: float = field(
        default=0.0, metadata={"help": "Stop after so many, with everything published; 0 for no such limit."}
    )
    fresh: bool = field(
        default=False, metadata={"help": "Begin again from --model, not where the run's last trainer ended."}
    )
    exact_old_policy: bool = field(
        default=False,
        metadata={"help": "Compute old log-probabilities with the very weights that made each token."},
    )

    def __post_init__(self) -> None:
        for option, known in (("encoding", get_args(Encoding)), ("mirror", get_args(Place))):
            if (value := getattr(self, option)) not in known:
                raise SystemExit(f"--{option} must be one of {', '.join(known)}; it is {value!r}")
        if self.minutes < 0:
            raise SystemExit(f"--minutes must be at least 0; it is {self.minutes}")
        if self.norm_learning_rate < 0:
            raise SystemExit(f"--norm_learning_rate must be at least 0; it is {self.norm_learning_rate}")
        if self.state_every < 1:
            raise SystemExit(f"--state_every must be at least 1; it is {self.state_every}")
        if self.canary_s < 0:
            raise SystemExit(f"--canary_s must be at least 0; it is {self.canary_s}")
