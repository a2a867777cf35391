"""Paired runs with equal seeds and games, then a table of what differs between them.

    python -m bench.research.study [--out runs/study] [--seeds 3] [--steps 40]

Each run is a process of its own and needs no GPU; one runs on each core. Finished runs are kept, so you can
repeat the command after an interruption, or with more seeds.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

from bench.research.study.table import ARMS, Arm, table
from delta_weight_sync import DeltaWeightSyncError
from trainer.demo.__main__ import env_settings
from trainer.demo.processes import ChildError, Processes, exclusive, free_port, interrupt_once

_POLL_S = 0.5
_ONE_CORE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.research.study", description="What staleness costs."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for the runs' files")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    interrupt_once()
    try:
        with exclusive(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            _run_all(options.out.resolve(), options.seeds, options.steps)
    except KeyboardInterrupt:
        sys.exit("stopped; repeat the command to do the missing runs")
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
                processes.start(file.stem, _command(arm, seed, steps, env, file), _ONE_CORE, may_end=True)
            if not running:
                return
            time.sleep(_POLL_S)


def _command(arm: Arm, seed: int, steps: int, env: int, file: Path) -> list[str]:
    command = [
        "bench.research.study.run",
        "--transport",
        arm.transport,
        "--lag",
        str(arm.lag),
        "--seed",
        str(seed),
    ]
    command += ["--steps", str(steps), "--env_url", f"http://127.0.0.1:{env}", "--out", str(file)]
    return command


if __name__ == "__main__":
    main()
