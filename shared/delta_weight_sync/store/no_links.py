"""Files below a folder, reached without ever following a link: each part of a path is opened by itself.

Whoever may write to a folder that a program reads could otherwise put a link there to any file of that
program's user, its environment (`/proc/self/environ`) included, or a pipe that keeps a reader waiting.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO
from uuid import uuid4

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # to open a pipe would wait for a writer
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def opened_folder(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Descriptor of the folder `parts` below `root`, which itself may be a link; `make` what is missing.

    Raises `NotADirectoryError` where a part is a link or a file, and `FileNotFoundError`.
    """
    folder = os.open(root, _ROOT)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def opened_file(root: Path, key: str) -> Iterator[BinaryIO]:
    """An ordinary file below `root`, to be read; raises `OSError`, also for what is no such file."""
    *folders, name = key.split("/")
    with opened_folder(root, folders) as folder:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EISDIR, f"{name} is no file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def replace_file(root: Path, key: str, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` fill a new file; it takes the place of what is at `key` if that succeeds."""
    *folders, name = key.split("/")
    temporary = f".{uuid4().hex}.part"
    with opened_folder(root, folders, make=True) as folder:
        try:
            with os.fdopen(os.open(temporary, _NEW, 0o666, dir_fd=folder), "wb") as file:
                write(file)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


Found = Iterator[tuple[str, os.stat_result]]


def files_below(folder: int, prefix: str, is_key: Callable[[str], bool]) -> Found:
    """Key and stat of each ordinary file below an open folder, where the key is one.

    What disappears meanwhile is left out. Keys have an end, so that nesting has one.
    """
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        key = prefix + entry.name
        if not is_key(key):
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if entry.is_dir(follow_symlinks=False):
                with _inner(folder, entry.name) as inner:
                    yield from files_below(inner, f"{key}/", is_key)
            elif entry.is_file(follow_symlinks=False):
                yield key, entry.stat(follow_symlinks=False)


@contextmanager
def _inner(folder: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
