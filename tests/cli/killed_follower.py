"""`python -m tests.cli.killed_follower URL BEFORE FOLDERS`: followers that `kill -9` ends, each elsewhere.

The process has one thread, so that it can fork at any time, and loads compiled code once for all of them.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from delta_weight_sync.cli import main
from tests.chaos.faulty import Mortal


def follow(url: str, before: Path, folders: Path) -> None:
    """Bring copy after copy of `before` to the newest version; copy `n` dies just before its change `n`.

    The last copy is the first that comes through.
    """
    _once(url, folders / "warm")
    for last in itertools.count(1):
        folder = folders / f"{last}"
        shutil.copytree(before, folder, symlinks=True)
        child = os.fork()
        if not child:
            _once_or_die(url, folder, last)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
        assert os.WTERMSIG(status) == signal.SIGKILL


def _once(url: str, folder: Path) -> None:
    main(["follow", url, "--into", str(folder), "--once"])


def _once_or_die(url: str, folder: Path, last: int) -> None:
    try:
        Mortal().die_writing(last, str(folder))
        _once(url, folder)
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
