"""A replica's own temporary folder; those that killed replicas left are removed when the next one starts."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from stat import S_ISDIR
from typing import Final

PREFIX: Final = "delta-weight-sync-replica-"
_MARK: Final = ".alive"  # a file that is locked as long as the process lives


def scratch_folder() -> Path:
    """A new one, which is gone when this process ends, unless that is killed."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _mark(folder)
    return folder


def _mark(folder: Path) -> None:
    """The lock is taken before the file has its name: no other process ever finds the mark unlocked."""
    coming = folder / f"{_MARK}.new"
    fcntl.flock(os.open(coming, os.O_CREAT | os.O_WRONLY, 0o600), fcntl.LOCK_EX)  # held until the end
    coming.rename(folder / _MARK)


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
