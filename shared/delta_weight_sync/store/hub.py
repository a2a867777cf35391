"""A bucket on the Hugging Face Hub, through huggingface_hub's own bucket functions.

The token comes from HF_TOKEN or the hub's login, the endpoint from HF_ENDPOINT. A failing request is
tried for about half a minute before it becomes a `BucketUnreachable`; a server that takes requests and
never answers holds a call for a minute and a half, storage that stalls within a transfer for up to twelve.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    BucketBatchError,
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version uses
)

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
from delta_weight_sync.store.hub_client import QUOTAS, configure_clients
from delta_weight_sync.store.hub_events import HubNotice
from delta_weight_sync.store.notice import Notice

SETTLE_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0)  # seconds; the Hub does not promise to show a write at once

FAILURES = (OSError, RuntimeError, ValueError, HTTPError, EntryNotFoundError)  # what the libraries raise


class HubBucket:
    """See `delta_weight_sync.store.Bucket`. An etag is the Xet hash of the content."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        match = re.fullmatch(r"hf://buckets/([\w.-]+/[\w.-]+)(?:/(.*?))?/?", url)
        if not match:
            raise BucketError(f"{url!r} is not a Hub bucket: write hf://buckets/<owner>/<name>[/<prefix>]")
        configure_clients()
        self.url = url.rstrip("/")
        self._id = match[1]
        self._folder = f"{check_key(match[2])}/" if match[2] else ""
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        if create:
            with self._explained("", write=True):
                self._api.create_bucket(self._id, private=True, exist_ok=True)

    def put(self, key: str, data: bytes | Path) -> None:
        """Store an object."""
        path, size = self._path(key), size_of(data)
        with self._explained(key, write=True):
            self._api.batch_bucket_files(self._id, add=[(data, path)])
        for pause in SETTLE_PAUSES:
            time.sleep(pause)
            info = self.stat(key)
            if info and info.size == size:
                return
        check_size(info, f"{self.url}/{key}", size)

    def get(self, key: str) -> bytes:
        """Read a small object."""
        with tempfile.TemporaryDirectory() as folder:
            self.fetch(key, Path(folder, "object"), SMALL)
            return Path(folder, "object").read_bytes()

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        """Download to `dest`; the client itself would empty the file before it fails."""
        path = self._path(key)
        with self._explained(key):
            found = next(iter(self._api.get_bucket_paths_info(self._id, [path])), None)
            if found is None:
                raise EntryNotFoundError(path)
        check_limit(found.size, f"{self.url}/{key}", limit)
        with self._explained(key), replacing(dest) as temporary:
            self._api.download_bucket_files(self._id, [(found, temporary)])

    def stat(self, key: str) -> ObjectInfo | None:
        """Look an object up: one HEAD request."""
        path = self._path(key)
        try:
            with self._explained(key):
                found = self._api.get_bucket_file_metadata(self._id, path)
        except ObjectMissing:
            return None
        return ObjectInfo(key, found.size, found.xet_file_data.file_hash)

    def list(self, prefix: str) -> Listing:
        """List a folder; the Hub matches a prefix letter by letter, so this filters again."""
        folder = self._folder + check_prefix(prefix)
        try:
            with self._explained(prefix):
                entries = list(self._api.list_bucket_tree(self._id, folder.rstrip("/"), recursive=True))
        except ObjectMissing:
            return []
        files = [entry for entry in entries if entry.type == "file" and entry.path.startswith(folder)]
        infos = (info for info in map(self._info, files) if is_key(info.key))
        return sorted(infos, key=lambda info: info.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        paths = [self._path(key) for key in keys]
        with self._explained(keys[0] if keys else "", write=True):
            self._api.batch_bucket_files(self._id, delete=paths)

    def _path(self, key: str) -> str:
        return self._folder + check_key(key)

    def _info(self, file: Any) -> ObjectInfo:
        written = file.uploaded_at and file.uploaded_at.timestamp()
        return ObjectInfo(file.path.removeprefix(self._folder), file.size, file.xet_hash, written)

    def notice(self, prefix: str) -> Notice:
        """Of the Hub's events."""
        folder = self._folder + check_prefix(prefix)
        return HubNotice(self._api.endpoint, self._id, folder, QUOTAS[self._id])

    @contextmanager
    def _explained(self, key: str, *, write: bool = False) -> Iterator[None]:
        """Turn whatever the libraries raise into a `BucketError`."""
        try:
            yield
        except FAILURES as error:
            raise self._explain(error, f"{self.url}/{key}".rstrip("/"), write) from error

    def _explain(self, error: Exception, place: str, write: bool) -> BucketError:
        if isinstance(error, EntryNotFoundError):
            return ObjectMissing(f"{place} does not exist")
        # Xet fails with builtin errors that do not tell a refusal from an outage; the Hub itself does.
        cause = error if isinstance(error, HTTPError) else self._probe(write)
        if isinstance(cause, HfHubHTTPError):
            return self._refusal(cause, place, write)
        if cause:
            return BucketUnreachable(
                f"{self._api.endpoint} gave no answer for {place} ({type(cause).__name__}): check the network"
                " and HF_ENDPOINT, and try again later"
            )
        return BucketUnreachable(
            f"{place} could not be transferred although the Hub answers ({_reason(error)}): check this"
            " machine's free disk space and its way to the Hub's storage, and try again later"
        )

    def _probe(self, write: bool) -> Exception | None:
        """Why the Hub would refuse this client, or None if it would not."""
        try:
            self._api.bucket_info(self._id)
            if write:
                self._api.batch_bucket_files(self._id, delete=[f"{self._folder}.no-such-object"])
        except FAILURES as error:
            return None if isinstance(error, BucketBatchError) else error
        return None

    def _refusal(self, error: HfHubHTTPError, place: str, write: bool) -> BucketError:
        status, right = error.response.status_code, "write" if write else "read"
        if status in (401, 403):
            why = "this token may not" if status == 403 else "the token is wrong or expired"
            why = why if get_token() else "HF_TOKEN is not set"
            return AccessDenied(
                f"the Hub refused {right} access to {place} ({status}, {why}): set HF_TOKEN to a token with"
                f" {right} access to {self._id}"
            )
        if status == 404:
            return BucketMissing(
                f"{self.url} does not exist or is hidden from this token: create it with `hf buckets create"
                f" {self._id}`, or set HF_TOKEN to a token that may see it"
            )
        if status in (408, 429) or status >= 500:
            return BucketUnreachable(
                f"the Hub answered {status} for {place}, also after several tries: try again later"
            )
        return BucketError(f"the Hub refused {place} ({_reason(error)}): correct the request")


def _reason(error: Exception) -> str:
    """A library's message in one line, without signed query strings and without the token."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split()))
    if token := get_token():
        text = text.replace(token, "***")
    return f"{type(error).__name__}: {text}"[:300]
