"""A bucket that is a folder of this machine, perhaps one that several machines mount.

It does without fsspec, whose listing leaves out a whole folder when one file of it disappears meanwhile.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from urllib.parse import unquote

from delta_weight_sync.store.base import (
    AccessDenied,
    BucketError,
    BucketMissing,
    BucketUnreachable,
    Listing,
    ObjectInfo,
    ObjectMissing,
    check_key,
    check_prefix,
    check_size,
    replacing,
    size_of,
)
from delta_weight_sync.store.notice import Notice


class FileBucket:
    """See `delta_weight_sync.store.Bucket`. Another program's files in the folder are listed like objects."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.url = url.rstrip("/")
        self._root = Path(unquote(url.removeprefix("file://")))
        if create:
            with self._explained(""):
                self._root.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes | Path) -> None:
        """Write beside the object, then rename."""
        path, size = self._path(key), size_of(data)
        with self._explained(key):
            self._root.stat()  # a folder that is not mounted must not be made anew
            with replacing(path) as temporary:
                _write(temporary, data)
        check_size(self.stat(key), f"{self.url}/{key}", size)

    def get(self, key: str) -> bytes:
        """Read an object."""
        path = self._path(key)
        with self._explained(key):
            return path.read_bytes()

    def fetch(self, key: str, dest: Path) -> None:
        """Copy to `dest`."""
        path = self._path(key)
        with self._explained(key), replacing(dest) as temporary:
            shutil.copyfile(path, temporary)

    def stat(self, key: str) -> ObjectInfo | None:
        """Look an object up."""
        path = self._path(key)
        with self._explained(key):
            return self._info(path)

    def list(self, prefix: str) -> Listing:
        """List a folder."""
        folder = self._root / check_prefix(prefix)
        with self._explained(prefix):
            self._root.stat()
            found = [self._info(path) for path in folder.rglob("*") if not path.name.startswith(".")]
        return sorted((info for info in found if info), key=lambda info: info.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; their folders stay."""
        for key in keys:
            path = self._path(key)
            with self._explained(key):
                self._root.stat()
                path.unlink(missing_ok=True)

    def notice(self, prefix: str) -> Notice:
        """By the clock."""
        check_prefix(prefix)
        return Notice()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _info(self, path: Path) -> ObjectInfo | None:
        try:
            found = path.stat()
        except FileNotFoundError:
            self._root.stat()
            return None
        etag = f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"
        key = path.relative_to(self._root).as_posix()
        if not S_ISREG(found.st_mode):
            return None
        return ObjectInfo(key, found.st_size, etag, found.st_mtime)

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
        if isinstance(error, PermissionError):
            return AccessDenied(f"{place} is closed to this user ({error}): change the permissions")
        return BucketUnreachable(f"{place} cannot be reached ({error}): check the disk and try again")


def _write(path: Path, data: bytes | Path) -> None:
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        shutil.copyfile(data, path)
    # The kernel's own times are milliseconds apart: too coarse for an etag, as inodes are used again.
    os.utime(path, ns=(now := time.time_ns(), now))
