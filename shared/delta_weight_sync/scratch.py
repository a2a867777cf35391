"""Temporary folders that a killed process does not leave behind for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Final

PREFIX: Final = "delta-weight-sync-"
_MARK: Final = ".alive"  # a file that stays locked while the process lives


class Scratch:
    """A temporary folder: removed with this object and at the end of the process.

    If the process is killed, the next `Scratch` of this user removes the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_left(left):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Lock the file before it gets its name, so no other process finds the mark unlocked while this lives.
        mark = folder / f"{_MARK}.new"
        lock = os.open(mark, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark.rename(folder / _MARK)
        self.path = folder / "files"
        self.path.mkdir()
        self.close = weakref.finalize(self, _remove, folder, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _is_left(folder: Path) -> bool:
    """Whether the folder is this user's and its process is gone. A folder without a mark is still new."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        with (folder / _MARK).open() as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # includes BlockingIOError: the lock is held
        return False
    return True
