"""`python -m tests.fuzz.bucket --cases N --seed S`: N forged runs, each through one that reads buckets.

Every one must end well or with a sentence, and all of them together in little memory.
"""

import contextlib
import io
import logging
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from delta_weight_sync.cli import main
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.publish.states import usable_states
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.disk import Layout
from delta_weight_sync.watch import Watcher
from inference_space.dashboard.data import Library
from inference_space.dashboard.export import export
from tests.fuzz import command
from tests.fuzz.forged import RUN, forged, intact_run, write_files

SECONDS_PER_CASE = 60  # more is a hang, on any machine
MEMORY = 400 << 20  # bytes that all cases may take beyond what a sound run takes


def fuzz(cases: int, seed: int, folder: Path) -> Counter[str]:
    """How many cases of each kind each reader was content with, or refused."""
    rng = Random(seed)
    counts = Counter[str]()
    logging.getLogger("delta_weight_sync").addHandler(logging.NullHandler())
    logging.getLogger("delta_weight_sync").propagate = False
    for reader in READERS:  # loads code, and fills caches
        url = write_files(intact_run(), folder / "bucket")
        assert check(reader, url, folder / "scratch", Random(0)), f"{reader.__name__} refused a sound run"
    before = _peak()
    # What a case would take beyond that is refused by the kernel, before this machine suffers.
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + 4 * MEMORY, resource.RLIM_INFINITY))
    for number in range(cases):
        kind, files = forged(rng)
        reader = READERS[number % len(READERS)]
        url = write_files(files, folder / "bucket")
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


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# Everyone who reads a bucket may take what it holds with success, or refuse it with a sentence. Whatever else
# is raised is a traceback for someone, and fails the case.
LONGEST = 8000  # characters of a sentence: it may name several objects
PAGES = 20 << 20  # bytes of an exported run


def dashboard(url: str, scratch: Path, rng: Random) -> None:
    bucket = open_bucket(url)
    export(bucket, rng.choice((None, RUN)), scratch / "site")
    assert sum(path.stat().st_size for path in (scratch / "site").iterdir()) < PAGES
    Library(bucket, lambda: RUN).verify(3)


def command_line(url: str, scratch: Path, rng: Random) -> None:
    out = str(scratch / "out")
    words = rng.choice(
        (
            ["log", url],
            ["show", url],
            ["show", url, "--version", str(rng.randrange(5))],
            ["verify", url],
            ["checkout", url, "--out", out],
            ["gc", url, "--keep", "1KB", "--dry-run"],
            ["follow", url, "--into", out, "--once"],
        )
    )
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise DeltaWeightSyncError(str(end.code)) from None


def follower(url: str, scratch: Path, rng: Random) -> None:
    """What a replica does before it stages a version: look, pass over what is damaged, fetch, rebuild."""
    reader = RunReader(open_bucket(url), RUN)
    with contextlib.closing(Watcher(reader)) as watcher:
        manifest = watcher.poll()
        complaint = watcher.problem()
    try:
        Layout(reader, scratch).put(manifest)
    except DeltaWeightSyncError:
        if older := reader.readable(manifest):
            Layout(reader, scratch).put(older)
        raise
    if complaint:
        raise complaint


def publisher(url: str, scratch: Path, rng: Random) -> None:
    bucket = open_bucket(url)
    RunWriter(bucket, RUN, model="m", assets=None)
    list(usable_states(RunReader(bucket, RUN)))


Reader = Callable[[str, Path, Random], None]
READERS: tuple[Reader, ...] = (dashboard, command_line, follower, publisher)


def check(reader: Reader, url: str, scratch: Path, rng: Random) -> bool:
    """True if the reader was content, False if it said why not; an AssertionError if that was no sentence."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    said = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            reader(url, scratch, rng)
        except (DeltaWeightSyncError, OSError) as error:
            said = str(error)
    lines = [*printed.getvalue().splitlines(), said or ""]
    assert said != "", "an error without words"
    assert all(line.isprintable() for line in lines), lines
    assert len(lines[-1]) < LONGEST, lines[-1][:1000]
    return said is None


if __name__ == "__main__":
    command(__doc__, 100_000, fuzz)
