"""`python -m tests.fuzz --cases N --seed S`: N damaged deltas; every one must be refused by name or harmless.

With NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own, the compiled kernels check every index.
"""

import argparse
import faulthandler
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.check import check, decoded
from tests.fuzz.mutate import mutate
from tests.fuzz.seeds import seeds

SECONDS_PER_CASE = 20  # more is a hang, on any machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    print(f"the case in hand is {folder / 'case.safetensors'}", flush=True)
    started = time.monotonic()
    counts = fuzz(options.cases, options.seed, folder / "case.safetensors")
    folder.rmdir()
    print(f"{counts.total()} cases in {time.monotonic() - started:.0f} s: {dict(counts)}")


def fuzz(cases: int, seed: int, path: Path) -> Counter[str]:
    """How many cases were refused and accepted."""
    rng, files, counts = Random(seed), list(seeds().values()), Counter[str]()
    for file in files:
        path.write_bytes(file)
        assert decoded(path), "a seed was refused"
    for _ in range(cases):
        path.write_bytes(mutate(rng.choice(files), rng))
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
        counts["accepted" if check(path) else "refused"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    path.unlink()
    return counts


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # says where a case hangs, then ends
    main()
