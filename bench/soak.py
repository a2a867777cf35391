"""Watches programs for leaks: memory, open files, sockets, threads, processes and files left in TMPDIR.

    python -m bench.soak --minutes 60 -- python -m trainer.demo

Starts the command, looks at it and all its descendants every ten seconds, ends it by SIGTERM when the time is
over, and compares the last quarter of the time with the second; the first is for warming up. A visitor
opens the dashboard with each look. Says what grew, and fails if anything did or something was left.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

EVERY_S = 10.0
PATIENCE_S = 120.0  # from SIGTERM to the end
KINDS = ("MB", "files", "sockets", "threads", "processes")
# glibc returns freed memory to the system. Otherwise it keeps around a hundred megabytes, and the sizes jump.
LOW_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{1 << 17}",
    "MALLOC_TRIM_THRESHOLD_": f"{1 << 17}",
}
MAY_GROW = dict.fromkeys(KINDS, 4.0) | {"MB": 16.0}
_PROGRAM = re.compile(r"-m ([\w.]+)|(VLLM::\w+)")

Look = dict[str, Counter[str]]


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(soak(arguments.command, 60 * arguments.minutes, Path(folder)))


def soak(command: list[str], seconds: float, folder: Path) -> int:
    """Run it with TMPDIR below `folder`; returns how many things grew or were left."""
    temporary = folder / "tmp"
    log = folder / "log"
    temporary.mkdir()
    with log.open("w") as out:
        program = psutil.Popen(
            command,
            env=os.environ | LOW_MEMORY | {"TMPDIR": str(temporary)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    looks = list[Look]()
    family = set[psutil.Process]()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and program.poll() is None:
        looks.append(look(program, temporary, family))
        _visit(log)
        time.sleep(EVERY_S)
    if program.poll() is not None:
        print(log.read_text()[-3000:], f"\nended by itself with {program.returncode}", flush=True)
        return 1
    program.send_signal(signal.SIGTERM)
    program.wait(PATIENCE_S)
    return compare(looks) + left(family, temporary)


def look(program: psutil.Process, temporary: Path, family: set[psutil.Process]) -> Look:
    """What each program holds now, by kind; `family` gets every process that was ever seen."""
    seen: Look = defaultdict(Counter)
    with suppress(psutil.NoSuchProcess):
        processes = [program, *program.children(recursive=True)]
        family.update(processes)
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDeniedError):
                seen[_name(process)].update(_held(process))
    seen["TMPDIR"]["files"] = sum(1 for _ in temporary.rglob("*"))
    return seen


def _name(process: psutil.Process) -> str:
    found = _PROGRAM.search(" ".join(process.cmdline()))
    return (found[1] or found[2]) if found else process.name()


def _held(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        return {
            "MB": process.memory_full_info().uss >> 20,
            "files": process.num_fds(),
            "sockets": len(process.net_connections()),
            "threads": process.num_threads(),
            "processes": 1,
        }


def _visit(log: Path) -> None:
    if found := re.search(r"dashboard +(http\S+)", log.read_text()):
        with suppress(httpx.HTTPError):
            httpx.get(found[1], timeout=EVERY_S)


def compare(looks: list[Look]) -> int:
    """Print medians of the second and the last quarter; returns how many grew."""
    quarter = len(looks) // 4
    grown = 0
    before = looks[quarter : 2 * quarter]
    after = looks[-quarter:]
    names = sorted({name for one in looks for name in one})
    print(f"{len(looks)} looks; second quarter -> last quarter, medians")
    for name in names:
        for kind in KINDS:
            was, now = (statistics.median(one[name][kind] for one in some) for some in (before, after))
            grew = now > 1.03 * was + MAY_GROW[kind]
            grown += grew
            if was or now:
                print(f"  {name:24} {kind:10} {was:9.1f} -> {now:9.1f}{'   GREW' if grew else ''}")
    print(f"{grown} grew", flush=True)
    return grown


def left(family: set[psutil.Process], temporary: Path) -> int:
    """Print which processes and temporary files outlived the programs; returns how many."""
    _, alive = psutil.wait_procs(list(family), timeout=PATIENCE_S)
    files = list(temporary.rglob("*"))
    print(
        f"left: {[_name(process) for process in alive]} {[str(file.name) for file in files][:20]}", flush=True
    )
    return len(alive) + len(files)


if __name__ == "__main__":
    main()
