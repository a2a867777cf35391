"""A bucket of any S3-compatible store, through s3fs.

Keys, region and endpoint come from the usual variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_DEFAULT_REGION, AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from aiohttp import ClientError as StreamError
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from delta_weight_sync import errors
from delta_weight_sync.store import _base


class S3Bucket(_base.Bucket):
    """See `delta_weight_sync.store.Bucket`."""

    _failures = (OSError, ValueError, BotoCoreError, ClientError, StreamError)

    def __init__(self, url: str, *, create: bool = False) -> None:
        match = re.fullmatch(r"s3://([a-z0-9.-]+)(?:/(.*?))?/?", url)
        if not match:
            raise errors.BucketError(f"{url!r} is not an S3 bucket: write s3://<name>[/<prefix>]")
        self.url = url.rstrip("/")
        self._root = f"{match[1]}/{_base.check_key(match[2])}/" if match[2] else f"{match[1]}/"
        self._fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        if create:
            with self._explained("", write=True):
                self._fs.makedirs(match[1], exist_ok=True)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._explained(key):
            data = self._first(path, _base.SMALL + 1)
        self._check_limit(key, len(data), _base.SMALL)
        return data

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        path = self._path(key)
        with self._explained(key):
            size = self._fs.info(path)["size"]
            self._check_limit(key, size, limit)
            with _base.replacing(dest) as temporary:
                if size <= _base.SMALL:
                    data = self._first(path, size)
                    temporary.write_bytes(data)
                    return hashlib.sha256(data).hexdigest()
                self._fs.get_file(path, str(temporary))  # writes parts side by side: hashed afterwards
                return _base.file_sha256(temporary)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._explained(key, write=True):
                self._fs.rm_file(path)

    def _put(self, key: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            self._fs.pipe_file(self._path(key), data)
        else:
            self._fs.put_file(str(data), self._path(key))

    def _stat(self, key: str) -> _base.ObjectInfo | None:
        """One request, and a second one if the object is absent."""
        found = self._fs.info(self._path(key))
        return self._info(found) if found["type"] == "file" else None

    def _list(self, prefix: str) -> Iterator[_base.ObjectInfo]:
        folder = self._root + prefix
        found = self._fs.find(folder, detail=True)
        return (self._info(entry) for name, entry in found.items() if name.startswith(folder))

    def _first(self, path: str, size: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(path, start=0, end=size))
        except OSError as error:
            if _code(error) == "InvalidRange":  # an object without a first byte
                return b""
            raise

    def _path(self, key: str) -> str:
        return self._root + _base.check_key(key)

    def _info(self, found: dict[str, Any]) -> _base.ObjectInfo:
        key, etag = found["name"].removeprefix(self._root), found["ETag"].strip('"')
        return _base.ObjectInfo(key, found["size"], etag, found["LastModified"].timestamp())

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        code, right = _code(error), "write" if write else "read"
        if code == "NoSuchBucket":
            return errors.BucketMissingError(
                f"{self.url} does not exist: create the bucket or correct its name"
            )
        if isinstance(error, FileNotFoundError):
            return errors.ObjectMissingError(f"{place} does not exist")
        if isinstance(error, PermissionError | NoCredentialsError):
            return errors.AccessDeniedError(
                f"the store refused {right} access to {place} ({code}): set AWS_ACCESS_KEY_ID and"
                f" AWS_SECRET_ACCESS_KEY to keys with {right} access"
            )
        return errors.BucketUnreachableError(
            f"{place} cannot be reached ({code}): check the network and AWS_ENDPOINT_URL, and try again later"
        )


def _code(error: Exception) -> str:
    """The store's own code for an error, if it gave one: s3fs keeps it in the exception's cause."""
    for known in (error, error.__cause__):
        if isinstance(known, ClientError):
            return str(known.response["Error"]["Code"])
    return type(error).__name__
