"""Fuzzers: `python -m tests.fuzz` of the delta reader, `python -m tests.fuzz.bucket` of readers of a run."""

import argparse
import faulthandler
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def command(doc: str, cases: int, fuzz: Callable[[int, int, Path], Counter[str]]) -> None:
    """The command line of a fuzzer. `fuzz` takes the number of cases, a seed and a folder; it counts ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # says where a case hangs, then ends
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    print(f"the case in hand is in {folder}", flush=True)
    started = time.monotonic()
    counts = fuzz(options.cases, options.seed, folder)
    print(f"{counts.total()} cases in {time.monotonic() - started:.0f} s: {dict(sorted(counts.items()))}")
