"""A bucket that is a folder; several machines may mount this folder.

No link below the folder is ever followed: each part of a path is opened separately. Otherwise another user
with write access could plant a link to any file that this program can read, such as `/proc/self/environ`.
Pipes, which could block this program, are not read either. fsspec and `os.fwalk` give no such protection.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final
from urllib.parse import unquote
from uuid import uuid4

from delta_weight_sync import errors, store

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BLOCK: Final = 1 << 20  # bytes copied at a time
_PART: Final = re.compile(r"\.[0-9a-f]{32}\.part")  # the name of an object while it is written
_LEFT_S: Final = 86_400.0  # seconds without a write after which an upload counts as killed
_NO_FILE: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}  # a link, folder, pipe or socket
_ABSENT = (FileNotFoundError, NotADirectoryError)


class FileBucket(store.Bucket):
    """See `delta_weight_sync.store.Bucket`. Other programs' files in the folder are listed like objects."""

    _failures = (OSError,)

    def __init__(self, url: str, *, create: bool = False) -> None:
        super().__init__(url)
        self._root = Path(unquote(url.removeprefix("file://")))
        if create:
            with self._explained(""):
                self._root.mkdir(parents=True, exist_ok=True)

    def _read(self, key: str, limit: int) -> Iterator[bytes]:
        *folders, name = key.split("/")
        with (
            self._opened_folder(folders) as folder,
            open(name, "rb", opener=lambda name, _: os.open(name, _FILE, dir_fd=folder)) as file,
        ):
            found = os.fstat(file.fileno())
            if not S_ISREG(found.st_mode):
                raise OSError(errno.EISDIR, f"{name} is not a file")
            self._check_limit(key, size := found.st_size, limit)
            while block := file.read(min(size, _BLOCK)):  # no more than `size`, even if the file grows
                yield block
                size -= len(block)

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects, or links that have the name of an object. Folders stay. In the folders of `keys`,
        also delete temporary files that are at least `_LEFT_S` old: killed uploads left these files."""
        self._root.stat()  # fails if the bucket's folder is missing; below, missing folders are no failure
        for key in keys:
            *folders, name = key.split("/")
            with suppress(*_ABSENT), self._opened_folder(folders) as folder:
                os.unlink(name, dir_fd=folder)
        for parts in {tuple(key.split("/")[:-1]) for key in keys}:
            with suppress(*_ABSENT), self._opened_folder(parts) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    left = _PART.fullmatch(entry.name) and entry.stat(follow_symlinks=False)
                    if left and time.time() - left.st_mtime >= _LEFT_S:
                        os.unlink(entry.name, dir_fd=folder)

    def _put(self, key: str, data: bytes | Path) -> None:
        """Write a temporary file, then rename it. The bucket's folder must exist: if it is a folder to mount
        and was not mounted yet, creating the folder would store the object on this machine only."""
        *folders, name = key.split("/")
        temporary = f".{uuid4().hex}.part"
        with self._opened_folder(folders, create=True) as folder:
            try:
                with os.fdopen(os.open(temporary, _NEW, 0o666, dir_fd=folder), "wb") as file:
                    _write(file, data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def _stat(self, key: str) -> store.ObjectInfo | None:
        *folders, name = key.split("/")
        with self._opened_folder(folders) as folder:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return _info(key, found) if S_ISREG(found.st_mode) else None

    def _list(self, prefix: str) -> Iterator[store.ObjectInfo]:
        with self._opened_folder(prefix.split("/")[:-1]) as folder:
            yield from _below(folder, prefix)

    @contextmanager
    def _opened_folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of a folder below the bucket's folder. Only the bucket's folder may be a link.
        Raises `NotADirectoryError` for other links and files, `FileNotFoundError` for a missing folder."""
        folder = os.open(self._root, _ROOT)
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        if isinstance(error, FileNotFoundError) and not self._root.is_dir():
            return errors.BucketMissingError(f"{self.url} does not exist: create the folder, or mount it")
        if isinstance(error, FileNotFoundError):
            return errors.ObjectMissingError(f"{place} does not exist")
        if isinstance(error, OSError) and error.errno in _NO_FILE:
            return errors.ObjectMissingError(
                f"{place} is not a file, or its path has a link; links are not followed: put a file there"
            )
        if isinstance(error, PermissionError):
            return errors.AccessDeniedError(
                f"this user has no access to {place} ({error}): change the permissions"
            )
        return errors.BucketUnreachableError(
            f"{place} cannot be reached ({error}): check the disk and try again"
        )


def _below(folder: int, prefix: str) -> Iterator[store.ObjectInfo]:
    """Yield the ordinary files below an open folder, if their paths are keys. Skip files that disappear
    meanwhile. Keys have a limited length, and this limits the depth of the recursion."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        key = prefix + entry.name
        if not store.is_key(key):
            continue
        with suppress(*_ABSENT):
            if entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, _FOLDER, dir_fd=folder)
                try:
                    yield from _below(inner, f"{key}/")
                finally:
                    os.close(inner)
            elif entry.is_file(follow_symlinks=False):
                yield _info(key, entry.stat(follow_symlinks=False))


def _info(key: str, found: os.stat_result) -> store.ObjectInfo:
    etag = f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"
    return store.ObjectInfo(key, found.st_size, etag, found.st_mtime)


def _write(file: BinaryIO, data: bytes | Path) -> None:
    if isinstance(data, bytes):
        file.write(data)
    else:
        with data.open("rb") as source:
            shutil.copyfileobj(source, file, _BLOCK)
    file.flush()
    # The kernel rounds times to milliseconds, and inodes are reused. So two contents could get the same etag.
    os.utime(file.fileno(), ns=(now := time.time_ns(), now))
