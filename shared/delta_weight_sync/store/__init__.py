"""The stores: a Hugging Face bucket, S3, or a folder, behind one small interface.

    bucket = open_bucket("hf://buckets/team/policies/wordle")
    bucket.put("runs/demo/run.json", b"...")

A key is relative to the bucket's URL; "/" joins its parts. A method that fails raises a `BucketError`, whose
message is one sentence, usually with the fix. Two failures raise another error: `OSError` if a local file
cannot be opened or written, and `ProtocolError` if an object is larger than allowed. No method checks
content: callers compare the sha256.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, NamedTuple
from uuid import uuid4

from delta_weight_sync import errors
from delta_weight_sync.store.ledger import Kind, Ledger, kind_of
from delta_weight_sync.store.notifications import Notifications

__all__ = ["Bucket", "HubFile", "Listing", "ObjectInfo", "open_bucket"]

SMALL: Final = 8 << 20  # bytes that `get` reads at most; every record of a run is smaller
DIRECT: Final = 16 << 20  # downloads of at most this many bytes use the Hub's URLs; larger ones use Xet
_PART = r"(?!\.)[!-.0-\[\]-~]+"  # printable ASCII without space, "/" and backslash; a dot cannot come first
_KEY = re.compile(f"{_PART}(/{_PART})*")


@dataclass(frozen=True)
class ObjectInfo:
    """What a bucket knows about one object without reading it."""

    key: str
    size: int  # bytes
    etag: str  # changes whenever the content changes; opaque
    written: float | None = field(default=None, compare=False)  # unix seconds at the store; None if unknown


class HubFile(NamedTuple):
    """A file of a model on the Hub."""

    size: int  # bytes
    sha256: str
    xet_hash: str  # names the content in the Hub's storage


Listing = list[ObjectInfo]
Objects = Sequence[tuple[str, bytes | Path]]  # key and content of each object to store


class Bucket(ABC):
    """Objects under one URL. Safe to use from several threads and processes."""

    report_every_s: ClassVar[float] = 1.0  # least seconds between two uploads that hold nothing but the log
    _counts_requests: ClassVar[bool] = False  # whether the store enters its requests in the ledger by itself
    copies_from_hub: ClassVar[bool] = False  # whether `find_on_hub` and `copy_from_hub` may succeed
    _failures: ClassVar[tuple[type[Exception], ...]]  # what the store's libraries raise

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.ledger = Ledger()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def put(self, key: str, data: bytes | Path) -> None:
        """Store an object, whole or not at all. An older object of this key is replaced."""
        check_key(key)
        # Before `_explained`: an unreadable local file must raise `OSError`.
        self.ledger.add(kind_of(key), sent=size_of(data))
        with self._explained(key, write=True):
            self._put(key, data)

    def upload(self, key: str, data: bytes) -> str:
        """Upload an object; return a receipt. Given the receipt, `put_all` in any process stores the object.

        A store that cannot separate upload and storing stores the object immediately, and returns "".
        """
        self.put(key, data)
        return ""

    def put_all(self, objects: Objects, receipts: Mapping[str, str] | None = None) -> None:
        """Store small objects, the last one after all others. After an error, some may be stored, each whole.

        `receipts`: key -> receipt of objects that `upload` has uploaded; these are stored first. Without
        objects and receipts, the method does nothing.
        """
        for key, data in objects:
            self.put(key, data)

    def get(self, key: str, limit: int = SMALL) -> bytes:
        """Read an object of at most `limit` bytes into memory."""
        return b"".join(self._blocks(key, limit))

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """Download an object of at most `limit` bytes to `dest`, creating its folder.

        If the download fails, an older file at `dest` stays as it was.

        Returns:
            The sha256 of the bytes that were written, as 64 hex digits.
        """
        sha256 = hashlib.sha256()
        # Outside `_explained`: an error of the local file must stay an `OSError`.
        with replacing(dest) as temporary, temporary.open("wb") as file:
            for block in self._blocks(key, limit):
                sha256.update(block)
                file.write(block)
        return sha256.hexdigest()

    def fetch_together(self, wanted: Sequence[tuple[str, Path, int]]) -> None:  # noqa: B027 - optional
        """Download those of the `wanted` objects that take fewer requests together than one by one.

        `wanted`: (key, dest, limit), as for `fetch`. The method skips all other objects, and those that
        `fetch` would refuse. In stores without a way to save requests, it downloads nothing.
        """

    def stat(self, key: str) -> ObjectInfo | None:
        """Return what the store knows about an object; None if the object is absent. Cheap enough to poll."""
        check_key(key)
        with suppress(errors.ObjectMissingError), self._explained(key, kind="polls"):
            return self._stat(key)
        return None

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo]:
        """Like `stat` for several objects, with fewer requests if the store can. Absent ones are left out."""
        found = {key: self.stat(key) for key in keys}
        return {key: info for key, info in found.items() if info is not None}

    def list(self, prefix: str) -> Listing:
        """List all objects below the folder `prefix` ("runs/demo/", or "" for all), sorted by key.

        `written` is set if the store knows it. Objects whose name is not a valid key are left out.
        """
        check_prefix(prefix)
        with suppress(errors.ObjectMissingError), self._explained(prefix, kind="polls"):
            found = [info for info in self._list(prefix) if is_key(info.key)]
            return sorted(found, key=lambda info: info.key)
        return []

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are fine."""
        for key in keys:
            check_key(key)
        if keys:
            with self._explained(keys[0], write=True, kind="deletions"):
                self._delete(keys)

    def find_on_hub(self, model: str, revision: str, names: Sequence[str]) -> dict[str, HubFile]:
        """Look up files of a model on the Hub, by name. Raises `BucketError` if one cannot be copied."""
        raise errors.BucketError(f"{self.url} is not on the Hub: copy {model} in another way")

    def copy_from_hub(self, model: str, files: Mapping[str, HubFile]) -> None:
        """Store copies of a model's files under these keys. The Hub copies them; nothing is uploaded.

        After an error, some may be stored. Without an error, all are stored, with this size and this hash.
        """
        raise errors.BucketError(f"{self.url} is not on the Hub: copy {model} in another way")

    def notifications(self, prefix: str) -> Notifications:
        """Notifications of changes below the folder `prefix`. Close them after use."""
        check_prefix(prefix)
        return Notifications()  # this store sends none, so the caller polls

    def _blocks(self, key: str, limit: int) -> Iterator[bytes]:
        with self._explained(check_key(key)):
            for block in self._read(key, limit):
                self.ledger.add(kind_of(key), received=len(block))
                yield block

    @abstractmethod
    def _put(self, key: str, data: bytes | Path) -> None:
        """Store an object."""

    @abstractmethod
    def _read(self, key: str, limit: int) -> Iterable[bytes]:
        """Yield the bytes of an object in parts. Calls `_check_limit` before it reads them."""

    @abstractmethod
    def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects, of which some may be missing."""

    @abstractmethod
    def _stat(self, key: str) -> ObjectInfo | None:
        """Look an object up."""

    @abstractmethod
    def _list(self, prefix: str) -> Iterable[ObjectInfo]:
        """List a folder in any order."""

    @contextmanager
    def _explained(self, key: str, *, write: bool = False, kind: Kind | None = None) -> Iterator[None]:
        """Count a request, and turn the libraries' exceptions into a `BucketError`."""
        if not self._counts_requests:
            self.ledger.add(kind or kind_of(key), requests=1)
        try:
            yield
        except errors.DeltaWeightSyncError:
            raise
        except self._failures as error:
            raise self._explain(error, f"{self.url}/{key}".rstrip("/"), write) from error

    @abstractmethod
    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        """The `BucketError` for what a library raised at `place`."""

    def _check_limit(self, key: str, size: int, limit: int) -> None:
        """Raise `ProtocolError` if an object's `size` is above `limit`; both are in bytes."""
        if size > limit:
            raise errors.ProtocolError(
                f"{self.url}/{key} has {size} bytes, but at most {limit} are allowed: it was not read"
            )


def open_bucket(url: str, *, create: bool = False) -> Bucket:
    """Open the bucket at `url`.

    Args:
        url: `hf://buckets/<owner>/<name>[/<prefix>]`, `s3://<name>[/<prefix>]` or `file:///<path>`.
        create: Create the bucket if it is missing; on the Hub, the new bucket is private. Without `create`,
            this call makes no request, and a missing bucket is an error at its first use.

    Raises:
        BucketError: The URL has another form, creating the bucket fails, or S3's keys are in an AWS profile
            but boto3, which reads profiles, is not installed.
        MissingExtraError: The packages for s3:// URLs are not installed.
    """
    # Import only what the store needs: other stores' libraries may be missing.
    if url.startswith("hf://"):
        from delta_weight_sync.store.hub import HubBucket

        return HubBucket(url, create=create)
    if url.startswith("s3://"):
        try:
            from delta_weight_sync.store._s3 import S3Bucket
        except ModuleNotFoundError as error:
            raise errors.MissingExtraError("an s3:// URL", "s3", error) from error
        return S3Bucket(url, create=create)
    if url.startswith("file:///"):
        from delta_weight_sync.store._files import FileBucket

        return FileBucket(url, create=create)
    raise errors.BucketError(
        f"{url!r} is not the URL of a bucket: write hf://buckets/<owner>/<name>, s3://<name> or file:///<path>"
    )


def size_of(data: bytes | Path) -> int:
    """The bytes of an object to store. Raises `OSError` if `data` is a file that cannot be opened."""
    if isinstance(data, bytes):
        return len(data)
    with data.open("rb") as file:
        return file.seek(0, 2)  # to its end


def is_key(key: str) -> bool:
    """Whether every store can hold an object with this key."""
    return len(key) <= 512 and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` if every store can hold it; otherwise raise `BucketError`."""
    if not is_key(key):
        raise errors.BucketError(
            f"{key[:600]!r} cannot be a key: use at most 512 printable ASCII characters without spaces or"
            " backslashes, no '/' at either end, and no part that is empty or starts with a dot"
        )
    return key


def check_prefix(prefix: str) -> None:
    """Raise `BucketError` unless `prefix` names a folder."""
    if prefix and not (prefix.endswith("/") and check_key(prefix[:-1])):
        raise errors.BucketError(f"the prefix {prefix!r} must be empty or end with '/'")


def file_sha256(path: Path) -> str:
    """The sha256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(dest: Path) -> Iterator[Path]:
    """Yield a temporary path next to `dest`. If the block succeeds, its file replaces `dest` in one step.
    An `OSError` of the block that names no file, as that of a write to a full disk, then names `dest`."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = dest.with_name(f".{uuid4().hex}.part")
    try:
        yield temporary
        temporary.replace(dest)
    except OSError as error:
        error.filename = error.filename or str(dest)
        raise
    finally:
        temporary.unlink(missing_ok=True)
