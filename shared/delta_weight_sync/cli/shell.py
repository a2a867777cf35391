"""Runs the users' commands, and ends them with this program."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from delta_weight_sync.ending import groups
from delta_weight_sync.records import Manifest

ENDING_S: Final = 3.0  # seconds from SIGTERM to SIGKILL; shorter than `cli._END_S`
PLACES: Final = re.compile(r"\{(path|version|digest)\}")


def run_in_shell(command: str, path: Path, manifest: Manifest, output: IO[bytes] | None = None) -> int:
    """Run the user's command for a version and return its exit code.

    {path}, {version} and {digest} are replaced by the version's folder, number and digest, each quoted for
    the shell. If a signal ended the command, the code is negative or above 128. `output` receives what the
    command prints; by default, it goes where this program prints."""
    values = {"path": str(path), "version": str(manifest.version), "digest": manifest.digest}
    filled = PLACES.sub(lambda match: shlex.quote(values[match[1]]), command)

    shells: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        shells.append(subprocess.Popen(filled, shell=True, process_group=0, stdout=output))
        groups.add(shells[0].pid)

    # Another thread starts the command. In this thread, an exception of a signal handler could interrupt the
    # start, and the process that was just started would be lost.
    with ThreadPoolExecutor(1) as starter:
        try:
            starter.submit(start).result()
            code = shells[0].wait()
        except BaseException:  # end the command and all processes that it started
            starter.shutdown()  # the signal may have come before the start
            for shell in shells:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        shell.wait(ENDING_S)
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
                groups.discard(shell.pid)
            raise
    groups.discard(shells[0].pid)
    return code


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the block runs, Ctrl-C and SIGTERM raise `SystemExit`, which also ends a running command."""
    codes: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 0}
    before = {sign: signal.signal(sign, lambda got, _: sys.exit(codes[got])) for sign in codes}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
