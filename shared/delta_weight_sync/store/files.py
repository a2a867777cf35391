"""A bucket that is a folder of this machine, perhaps one that several machines mount.

It does without fsspec, whose listing leaves out a whole folder when one file of it disappears meanwhile, and
follows no links below the folder.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final
from urllib.parse import unquote

from delta_weight_sync.store.base import (
    SMALL,
    AccessDenied,
    BucketError,
    BucketMissing,
    BucketUnreachable,
    Listing,
    ObjectInfo,
    ObjectMissing,
    check_key,
    check_limit,
    check_prefix,
    check_size,
    is_key,
    replacing,
    size_of,
)
from delta_weight_sync.store.no_links import files_below, opened_file, opened_folder, replace_file
from delta_weight_sync.store.notice import Notice

_BLOCK: Final = 1 << 20  # bytes copied at a time
_NO_FILE: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}


class FileBucket:
    """See `delta_weight_sync.store.Bucket`. Another program's files in the folder are listed like objects."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.url = url.rstrip("/")
        self._root = Path(unquote(url.removeprefix("file://")))
        if create:
            with self._explained(""):
                self._root.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes | Path) -> None:
        """Write beside the object, then rename. A folder that is not mounted is not made anew."""
        check_key(key)
        size = size_of(data)
        with self._explained(key):
            replace_file(self._root, key, lambda file: _write(file, data))
        check_size(self.stat(key), f"{self.url}/{key}", size)

    def get(self, key: str) -> bytes:
        """Read an object."""
        with self._opened(key) as file:
            check_limit(size := _size(file), f"{self.url}/{key}", SMALL)
            with self._explained(key):
                return file.read(size)

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        """Copy to `dest`."""
        with self._opened(key) as file:
            check_limit(size := _size(file), f"{self.url}/{key}", limit)
            with self._explained(key), replacing(dest) as temporary, temporary.open("wb") as copy:
                _copy(file, copy, size)

    def stat(self, key: str) -> ObjectInfo | None:
        """Look an object up."""
        *folders, name = check_key(key).split("/")
        with self._explained(key):
            try:
                with opened_folder(self._root, folders) as folder:
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                self._root.stat()
                return None
        return _info(key, found) if S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Listing:
        """List a folder."""
        folders = check_prefix(prefix).split("/")[:-1]
        with self._explained(prefix):
            try:
                with opened_folder(self._root, folders) as folder:
                    found = list(files_below(folder, prefix, is_key))
            except (FileNotFoundError, NotADirectoryError):
                self._root.stat()
                return []
        return sorted((_info(key, stat) for key, stat in found), key=lambda info: info.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and links that are in the place of one; folders stay."""
        for key in keys:
            *folders, name = check_key(key).split("/")
            with self._explained(key):
                self._root.stat()
                with (
                    suppress(FileNotFoundError, NotADirectoryError),
                    opened_folder(self._root, folders) as folder,
                ):
                    os.unlink(name, dir_fd=folder)

    def notice(self, prefix: str) -> Notice:
        """By the clock."""
        check_prefix(prefix)
        return Notice()

    @contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        """The object's file; what goes wrong inside of the block is not explained."""
        check_key(key)
        with ExitStack() as stack:
            with self._explained(key):
                file = stack.enter_context(opened_file(self._root, key))
            yield file

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn an `OSError` into a `BucketError`."""
        try:
            yield
        except OSError as error:
            raise self._explain(error, f"{self.url}/{key}".rstrip("/")) from error

    def _explain(self, error: OSError, place: str) -> BucketError:
        if isinstance(error, FileNotFoundError) and not self._root.is_dir():
            return BucketMissing(f"{self.url} does not exist: create the folder, or mount it")
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(f"{place} does not exist")
        if error.errno in _NO_FILE:
            return ObjectMissing(
                f"{place} is no file, or behind a link: links are not followed, put the file itself there"
            )
        if isinstance(error, PermissionError):
            return AccessDenied(f"{place} is closed to this user ({error}): change the permissions")
        return BucketUnreachable(f"{place} cannot be reached ({error}): check the disk and try again")


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    etag = f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"
    return ObjectInfo(key, found.st_size, etag, found.st_mtime)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _copy(source: BinaryIO, dest: BinaryIO, size: int) -> None:
    """At most `size` bytes, also of a file that grows meanwhile."""
    while block := source.read(min(size, _BLOCK)):
        dest.write(block)
        size -= len(block)


def _write(file: BinaryIO, data: bytes | Path) -> None:
    if isinstance(data, bytes):
        file.write(data)
    else:
        with data.open("rb") as source:
            _copy(source, file, data.stat().st_size)
    file.flush()
    # The kernel's own times are milliseconds apart: too coarse for an etag, as inodes are used again.
    os.utime(file.fileno(), ns=(now := time.time_ns(), now))
