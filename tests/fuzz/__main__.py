"""`python -m tests.fuzz --cases N --seed S`: N damaged deltas; every one must be refused by name or harmless.

With NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own, the compiled kernels check every index.
"""

import signal
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz import command
from tests.fuzz.deltas import check, decoded, mutate, seeds

SECONDS_PER_CASE = 20  # more is a hang, on any machine


def fuzz(cases: int, seed: int, folder: Path) -> Counter[str]:
    """How many cases were refused and accepted."""
    rng = Random(seed)
    files = list(seeds().values())
    counts = Counter[str]()
    path = folder / "case.safetensors"
    for file in files:
        path.write_bytes(file)
        assert decoded(path), "a seed was refused"
    for _ in range(cases):
        path.write_bytes(mutate(rng.choice(files), rng))
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
        counts["accepted" if check(path) else "refused"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    path.unlink()
    folder.rmdir()
    return counts


if __name__ == "__main__":
    command(__doc__, 10_000, fuzz)
