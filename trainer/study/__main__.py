"""Paired runs with equal seeds and games, then a table of what differs between them.

    python -m trainer.study [--out runs/study] [--seeds 3] [--steps 40]

Each run is a process of its own that needs no GPU; as many go side by side as there are cores. A run that is
finished is not done again, so the same command goes on after an interruption, or with more seeds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

from delta_weight_sync import DeltaWeightSyncError
from trainer.local_settings import env_settings
from trainer.processes import ChildError, Processes, free_port, interrupt_once, only_one
from trainer.study.table import ARMS, Arm, table

_LOOK_S = 0.5
_ONE_CORE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.study", description="What staleness costs.")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the runs' files")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each kind")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    interrupt_once()
    try:
        with only_one(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            _run_all(options.out.resolve(), options.seeds, options.steps)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with the runs that are missing")
    except (ChildError, DeltaWeightSyncError) as error:
        sys.exit(f"study: {error}")
    text = table(options.out, range(options.seeds))
    (options.out / "README.md").write_text(text)
    print(text)


def _run_all(out: Path, seeds: int, steps: int) -> None:
    missing = [
        (arm, seed, file)
        for seed, arm in itertools.product(range(seeds), ARMS)
        if not (file := out / arm.file(seed)).exists()
    ]
    env = free_port()
    with Processes(out) as processes:
        processes.start("env", ["env_space.app"], env_settings(env))
        waiting, running = iter(missing), set[str]()
        while True:
            done = {name for name in running if processes.finished(name)}
            running -= done
            for arm, seed, file in itertools.islice(waiting, (os.cpu_count() or 1) - len(running)):
                print(f"{time.strftime('%H:%M:%S')}  {file.stem}", flush=True)
                running.add(file.stem)
                processes.start(file.stem, _command(arm, seed, steps, env, file), _ONE_CORE, passing=True)
            if not running:
                return
            time.sleep(_LOOK_S)


def _command(arm: Arm, seed: int, steps: int, env: int, file: Path) -> list[str]:
    command = ["trainer.study.run", "--carrier", arm.carrier, "--lag", str(arm.lag), "--seed", str(seed)]
    command += ["--steps", str(steps), "--env_url", f"http://127.0.0.1:{env}", "--out", str(file)]
    return command


if __name__ == "__main__":
    main()
