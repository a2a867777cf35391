"""The settings of `python -m trainer.train`, in addition to those of TRL's `AsyncGRPOConfig`."""

from dataclasses import MISSING, dataclass, field
from typing import Any

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish.mirror import Place

TASKS = ("wordle", "reverse_text", "brevity")  # modules of `trainer.tasks`


def _option(help_text: str, default: Any = MISSING) -> Any:
    return field(metadata={"help": help_text}, default=default)


@dataclass(frozen=True)
class Settings:
    """Command line options and keys of a configuration file; see `trainer/configs/`."""

    replicas: list[str] = field(metadata={"help": "URLs of replicas (inference_space), or files of them."})
    model: str = _option("Base policy: a Hub id or the folder of a checkpoint.")
    bucket: str = _option("The bucket: hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>")
    run: str = _option("Name of the run. Its objects are stored below runs/<run>/ in the bucket.")
    task: str = _option(f"What to train on: {', '.join(TASKS)}.", "wordle")
    env_url: str = _option("URL of the Wordle Space, or a file with the URL (task 'wordle').", "")
    prompt: str = _option("Prompt of each game (task 'wordle'); default: the rules of Wordle.", "")
    encoding: Encoding = field(default="fast", metadata={"help": "Encoding of deltas."})
    mirror: Place = field(default="host", metadata={"help": "Where the mirror (bf16 copy of weights) is."})
    keep: str = _option("How much of the run the bucket keeps, such as '20GB' or '7d'; default: all.", "")
    state_every: int = _option(
        "Minimum syncs between states; --state_minutes is a minimum, too. The last state does not wait."
        " 0: save no states; then a trainer that ends cannot resume.",
        20,
    )
    state_minutes: float = _option("Minimum minutes between states. The last state does not wait.", 5.0)
    norm_learning_rate: float = _option("Learning rate of norms and biases; 0: same as --learning_rate.", 0.0)
    minutes: float = _option("Stop after this many minutes and publish everything; 0: no limit.", 0.0)
    job: str = _option(
        "Only print the command that runs this trainer, with environment and replicas, as Jobs of the Hub;"
        " give the trainer's hardware, such as l4x1.",
        "",
    )
    fresh: bool = _option("Start again from --model instead of resuming the run.", False)
    exact_old_policy: bool = _option(
        "Recompute the old log-probability of each token with the weights that generated the token.", False
    )

    def __post_init__(self) -> None:
        smallest = {"minutes": 0, "state_minutes": 0, "norm_learning_rate": 0, "state_every": 0}
        for option, least in smallest.items():
            if (number := getattr(self, option)) < least:
                raise SystemExit(f"--{option} must be at least {least}; it is {number}")
