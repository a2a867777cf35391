"""Temporary folders that a killed process does not leave behind for long."""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mounts")
PREFIX: Final = "delta-weight-sync-folder-"


class Scratch:
    """A temporary folder, which is removed with this object or at the end of the process.

    The process holds a lock on the folder. If the process is killed, the lock is released, and the next
    `Scratch` of this user removes the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_left(left):
                shutil.rmtree(left, ignore_errors=True)
        # Lock the folder before it gets its name, so that no other process finds it unlocked.
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        lock = os.open(new, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name[1:]))
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def is_memory(folder: Path) -> bool:
    """Whether files in a folder take memory instead of disk space, because the folder is in a tmpfs."""
    place = os.fsencode(folder.resolve())
    kind = b""
    longest = -1
    with suppress(OSError):
        for mount in _MOUNTS.read_bytes().splitlines():
            _, point, found, *_ = mount.split(b" ")
            point = point.replace(rb"\040", b" ").rstrip(b"/")
            if len(point) > longest and (place == point or place.startswith(point + b"/")):
                longest = len(point)
                kind = found
    return kind in (b"tmpfs", b"ramfs")


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits this at its exit
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _is_left(folder: Path) -> bool:
    """Whether a killed process of this user left `folder`: it is no link, and no process holds its lock."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(lock).st_uid == os.getuid()
        finally:
            os.close(lock)
    return False
