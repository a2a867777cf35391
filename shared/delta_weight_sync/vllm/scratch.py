"""A replica's own temporary folder; those that killed replicas left are removed when the next one starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from stat import S_ISDIR
from typing import Final, TextIO

PREFIX: Final = "delta-weight-sync-replica-"
_MARK: Final = ".alive"  # a file that is locked as long as the process lives


class Scratch:
    """Gone when the process ends, unless that is killed."""

    def __init__(self) -> None:
        _remove_left()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._mark = _marked(self.path)


def _marked(folder: Path) -> TextIO:
    """The lock is taken before the file has its name: no other process ever finds the mark unlocked."""
    coming = folder / f"{_MARK}.new"
    mark = coming.open("w")
    fcntl.flock(mark, fcntl.LOCK_EX)
    coming.rename(folder / _MARK)
    return mark


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_left(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether it is a folder of this user's whose process is gone; one without a mark is just being made."""
    try:
        found = folder.lstat()
        if not S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        with (folder / _MARK).open() as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # among them BlockingIOError: it is held
        return False
    return True
