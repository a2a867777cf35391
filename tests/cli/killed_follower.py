"""`python -m tests.cli.killed_follower URL BEFORE FOLDERS`: followers that `kill -9` ends, each elsewhere.

The process has one thread, so that it can fork at any time, and loads compiled code once for all of them.
"""

import itertools
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delta_weight_sync.cli import main

# Between any two of these calls, the disk does not change by the follower.
MOMENTS = (
    *("shutil.rmtree", "shutil.copyfile", "delta_weight_sync.codec.apply"),
    *("pathlib.Path.mkdir", "pathlib.Path.unlink", "pathlib.Path.write_bytes", "pathlib.Path.write_text"),
    *("pathlib.Path.rename", "pathlib.Path.replace", "pathlib.Path.symlink_to"),
)


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
    numbers = itertools.count(1)

    def or_die(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            if next(numbers) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **words)

        return call

    try:
        for name in MOMENTS:
            place, attribute = name.rsplit(".", 1)
            owner = pkgutil.resolve_name(place)
            setattr(owner, attribute, or_die(getattr(owner, attribute)))
        _once(url, folder)
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
