"""One section in a process of its own: `python -m bench.section NAME` puts its figures into results.json."""

import importlib
import sys
import time

import torch

from bench import machine, results


def main(name: str) -> None:
    """Run the section on one thread."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    figures = importlib.import_module(f"bench.{name}").run(results.read())
    clocks = {"wall_s": round(time.perf_counter() - started), "processor_s": round(time.process_time())}
    results.put(name, {"date": machine.today(), "load": machine.load(), **clocks, **figures})


if __name__ == "__main__":
    main(sys.argv[1])
