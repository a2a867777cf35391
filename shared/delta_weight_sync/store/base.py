"""The store: one small interface over a Hugging Face bucket, S3 or a folder.

    bucket = open_bucket("hf://buckets/team/policies/wordle")
    bucket.put("runs/demo/HEAD", b"...")

A key is relative to the bucket's URL, parts joined by "/". Every method raises a `BucketError` whose
message is one sentence with the fix, and nothing else, except `OSError` for a local file to upload that
cannot be read, and `ProtocolError` for an object that is larger than its reader allows, which is not read. No
method checks content: readers compare sha256 themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol
from uuid import uuid4

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store.notice import Notice

SMALL: Final = 8 << 20  # bytes that `get` reads at most: no record of a run has as many
_PART = r"(?!\.)[!-.0-\[\]-~]+"  # printable ASCII but "/" and the backslash; no dot in front
_KEY = re.compile(f"{_PART}(/{_PART})*")


class BucketError(DeltaWeightSyncError, RuntimeError):
    """An operation on a bucket failed. Messages never hold a token."""


class ObjectMissing(BucketError):  # noqa: N818
    """There is no object with this key."""


class BucketMissing(BucketError):  # noqa: N818
    """The bucket does not exist, or is hidden from this token."""


class AccessDenied(BucketError):  # noqa: N818
    """The credentials are missing, wrong or not allowed to do this; trying again does not help."""


class BucketUnreachable(BucketError):  # noqa: N818
    """The store gave no usable answer after several tries; trying again later may help."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a bucket knows about one object without reading it."""

    key: str
    size: int  # bytes
    etag: str  # changes whenever the content changes; opaque
    written: float | None = field(default=None, compare=False)  # unix seconds of the store; None: not told


Listing = list[ObjectInfo]


class Bucket(Protocol):
    """Objects under one URL. Safe to use from several threads and processes."""

    url: str

    def put(self, key: str, data: bytes | Path) -> None:
        """Store an object, whole or not at all; replaces an older one and checks the stored size."""

    def get(self, key: str) -> bytes:
        """Read an object of at most `SMALL` bytes into memory."""

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        """Download an object of at most `limit` bytes to `dest`, making its folder.

        What is there already survives any failure.
        """

    def stat(self, key: str) -> ObjectInfo | None:
        """Look an object up, None if absent; cheap enough to poll."""

    def list(self, prefix: str) -> Listing:
        """All objects below the folder `prefix` ("runs/demo/", or "" for everything), sorted by key.

        Each says when it was written. What lies there under a name that is no key is left out.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are missing already are fine."""

    def notice(self, prefix: str) -> Notice:
        """When to look again at what is below the folder `prefix`; to be closed."""


def is_key(key: str) -> bool:
    """Whether every backend can hold an object with this key."""
    return len(key) <= 512 and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return a key that every backend can hold; refuse all others with `BucketError`."""
    if not is_key(key):
        raise BucketError(
            f"{key[:600]!r} cannot be a key: use at most 512 printable ASCII characters without spaces or"
            " backslashes, no '/' at either end, and no part that is empty or starts with a dot"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return a prefix that names a folder; refuse all others with `BucketError`."""
    if prefix and not (prefix.endswith("/") and check_key(prefix[:-1])):
        raise BucketError(f"the prefix {prefix!r} must be empty or end with '/'")
    return prefix


def check_limit(size: int, place: str, limit: int) -> None:
    """Before a download: raise `ProtocolError` for an object of `size` bytes that may have `limit`."""
    if size > limit:
        raise ProtocolError(f"{place} has {size} bytes, where at most {limit} are allowed: it was not read")


def check_size(info: ObjectInfo | None, place: str, size: int) -> None:
    """After an upload: raise `BucketError` unless the object is there with `size` bytes."""
    if info is None or info.size != size:
        found = "is not there" if info is None else f"has {info.size} bytes"
        raise BucketError(f"{place} {found} after an upload of {size} bytes: upload it again")


def size_of(data: bytes | Path) -> int:
    """Bytes of what is to be uploaded."""
    return len(data) if isinstance(data, bytes) else data.stat().st_size


@contextmanager
def replacing(dest: Path) -> Iterator[Path]:
    """A path beside `dest` to write to; it replaces `dest` in one step if the block succeeds."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = dest.with_name(f".{uuid4().hex}.part")
    try:
        yield temporary
        temporary.replace(dest)
    finally:
        temporary.unlink(missing_ok=True)
