"""Trainers whose replica never answers, so that they wait for samples, one after the other.

    python -m tests.trainer.waiting FOLDER LIVES

Each is a fork of this process, which has imported what takes long; it says "waiting" once its child plays.
This one says each one's number first, and how it ended.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from trl.experimental.async_grpo import AsyncGRPOConfig

from tests.policies import tiny
from trainer import rollouts, train
from trainer.arguments import ScriptArguments

NOBODY = "http://127.0.0.1:1"


def main(folder: Path) -> None:
    """The command of `trainer.train`, with spaces that are said to be ready."""
    if not (folder / "base").exists():
        tiny.build(folder / "base", tie=True, seed=0)
    script = ScriptArguments(
        model=str(folder / "base"),
        bucket=(folder / "bucket").as_uri(),
        run="run",
        replicas=[NOBODY],
        task="shorter",
    )
    settings = AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=5,
        token_budget=0,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    parser = SimpleNamespace(parse_args_and_config=lambda: (script, settings))
    with (
        mock.patch.object(train, "TrlParser", return_value=parser),
        mock.patch.object(train.ColdSpaces, "wait"),
        mock.patch.object(
            rollouts.ReplicaRolloutWorker, "start", _and_say(rollouts.ReplicaRolloutWorker.start)
        ),
    ):
        train.main()


def _and_say(start):
    def start_and_say(worker: rollouts.ReplicaRolloutWorker) -> None:
        start(worker)
        print("waiting", flush=True)

    return start_and_say


if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        if (life := os.fork()) == 0:
            try:
                main(Path(sys.argv[1]))
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(int(end.code or 0))  # to take a fork's memory apart copies it first
        print("trainer", life, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
    os._exit(0)
