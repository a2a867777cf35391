"""`python -m tests.fuzz.bucket --cases N --seed S`: N forged runs, each through one that reads buckets.

Every one must end well or with a sentence, and all of them together in little memory.
"""

import logging
import resource
import signal
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz import command
from tests.fuzz.forged import forged, sound, written
from tests.fuzz.readers import READERS, check

SECONDS_PER_CASE = 60  # more is a hang, on any machine
MEMORY = 400 << 20  # bytes that all cases may take beyond what a sound run takes


def fuzz(cases: int, seed: int, folder: Path) -> Counter[str]:
    """How many cases of each kind each reader was content with, or refused."""
    rng, counts = Random(seed), Counter[str]()
    logging.getLogger("delta_weight_sync").addHandler(logging.NullHandler())
    logging.getLogger("delta_weight_sync").propagate = False
    before = _warmed_up(folder)
    _limit_memory()
    for number in range(cases):
        kind, files = forged(rng)
        reader = READERS[number % len(READERS)]
        url = written(files, folder / "bucket")
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
        try:
            content = check(reader, url, folder / "scratch", rng)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {number}: {reader.__name__}, {kind}") from error
        signal.setitimer(signal.ITIMER_REAL, 0)
        counts[f"{reader.__name__} {'took' if content else 'refused'} {kind}"] += 1
    taken = _peak() - before
    assert taken < MEMORY, f"{taken >> 20} MiB"
    return counts


def _warmed_up(folder: Path) -> int:
    """Bytes at most, after each reader has read a sound run: code and caches."""
    for reader in READERS:
        url = written(sound(), folder / "bucket")
        assert check(reader, url, folder / "scratch", Random(0)), f"{reader.__name__} refused a sound run"
    return _peak()


def _limit_memory() -> None:
    """What a case would take beyond that is refused by the kernel, before this machine suffers."""
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + 4 * MEMORY, resource.RLIM_INFINITY))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    command(__doc__, 100_000, fuzz)
