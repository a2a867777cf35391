"""Trainers whose replica never answers, so that they wait for samples, one after the other.

    python -m tests.support.waiting_trainer FOLDER LIVES

Each is a fork of this process, which has imported what takes long; it says "waiting" once its child plays.
This one says each one's number first, and how it ended.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from examples import tiny_policy as tiny
from tests.support.trainer_lives import cpu_config
from trainer import rollouts, train
from trainer.settings import Settings

NOBODY = "http://127.0.0.1:1"


def main(folder: Path) -> None:
    """The command of `trainer.train`, with spaces that are said to be ready."""
    if not (folder / "base").exists():
        tiny.build(folder / "base", tie=True, seed=0)
    script = Settings(
        model=str(folder / "base"),
        bucket=(folder / "bucket").as_uri(),
        run="run",
        replicas=[NOBODY],
        task="brevity",
    )
    settings = cpu_config(folder / "trl", max_steps=5)
    parser = SimpleNamespace(parse_args_and_config=lambda: (script, settings))
    with (
        mock.patch.object(train, "TrlParser", return_value=parser),
        mock.patch.object(train.Spaces, "wait"),
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
