"""A bucket on the Hugging Face Hub, through huggingface_hub's own bucket functions.

The token comes from HF_TOKEN or the Hub's login, the endpoint from HF_ENDPOINT. huggingface_hub's HTTP client
is bounded in time here, and what its answers say of the quota is noted. A failing request is retried for
about half a minute before it becomes a `BucketUnreachableError`; a server that accepts requests and never
answers holds a call for a minute and a half, storage that stalls within a transfer for up to twelve minutes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, set_client_factory
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    BucketBatchError,
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version uses
)
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from delta_weight_sync import errors
from delta_weight_sync.store import _base
from delta_weight_sync.store._events import HubNotifications, retry_after_s
from delta_weight_sync.store._notifications import Notifications, Quota

REQUEST_TIMEOUT = 10.0  # seconds; by default the client waits without end
LONGEST_PAUSE = 10  # seconds that a server may ask the client to wait; by default the client waits for hours
FAILURES = (OSError, RuntimeError, ValueError, HTTPError, EntryNotFoundError)  # what the libraries raise

# Only these two settings of hf_xet shorten its retries. By default it retries for up to five minutes. Its
# read timeout must stay at two minutes per attempt: it also runs while a block of 64 MB is being sent.
XET_SETTINGS = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "2s", "HF_XET_CLIENT_RETRY_MAX_DURATION": "16s"}

_BUCKET = re.compile(r"/buckets/([^/]+/[^/]+)(?:/|$)(?!events$)")
_quotas: defaultdict[str, Quota] = defaultdict(Quota)  # by bucket: what its answers say of the token's quota


@cache
def _configure_clients() -> None:
    """Once per process: huggingface_hub and hf_xet have no settings for a single bucket."""
    for name, value in XET_SETTINGS.items():
        os.environ.setdefault(name, value)
    disable_progress_bars()  # a bar for every sync would flood the log
    set_client_factory(_client)


def _client() -> Any:
    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _limit_time],
        "response": [*hooks["response"], _note_quota, _limit_pause],
    }
    return client


def _bucket_of(request: Any) -> str:
    """The bucket that a request is for; "" for other requests, and for a bucket's feed, which has no end."""
    place = _BUCKET.search(request.url.path)
    return place[1] if place else ""


def _limit_time(request: Any) -> None:
    """Bound each request for a bucket; other users of this client keep their own limits."""
    if _bucket_of(request):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), REQUEST_TIMEOUT)


def _note_quota(response: Any) -> None:
    if bucket := _bucket_of(response.request):
        quota, said = _quotas[bucket], parse_ratelimit_headers(response.headers)
        if response.status_code == 429:
            quota.refused(retry_after_s(response.headers))
        elif said and said.resource_type == "resolvers":
            quota.left(said.remaining, said.reset_in_seconds)


def _limit_pause(response: Any) -> None:
    """Shorten the pause that a busy server asks for: the client would sleep all of it."""
    asked = response.headers.get("retry-after", "")
    if _bucket_of(response.request) and response.status_code in (429, 503):
        response.headers.pop("ratelimit", None)  # this header asks for a pause, too
        response.headers["retry-after"] = str(min(int(asked), LONGEST_PAUSE)) if asked.isdigit() else ""


class HubBucket(_base.Bucket):
    """See `delta_weight_sync.store.Bucket`. An etag is the Xet hash of the content."""

    _failures = FAILURES
    _settle_pauses = (0.0, 0.5, 1.0, 2.0, 4.0)  # the Hub may show a write a little later

    def __init__(self, url: str, *, create: bool = False) -> None:
        match = re.fullmatch(r"hf://buckets/([\w.-]+/[\w.-]+)(?:/(.*?))?/?", url)
        if not match:
            raise errors.BucketError(
                f"{url!r} is not a Hub bucket: write hf://buckets/<owner>/<name>[/<prefix>]"
            )
        _configure_clients()
        self.url = url.rstrip("/")
        self._id = match[1]
        self._folder = f"{_base.check_key(match[2])}/" if match[2] else ""
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        if create:
            with self._explained("", write=True):
                self._api.create_bucket(self._id, private=True, exist_ok=True)

    def get(self, key: str) -> bytes:
        """Read a small object."""
        with tempfile.TemporaryDirectory() as folder:
            self.fetch(key, path := Path(folder, "object"), _base.SMALL)
            return path.read_bytes()

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """Download to `dest`; returns the sha256.

        huggingface_hub writes the file itself and offers no hook to hash the bytes on their way, so the file
        is hashed right after, from the page cache.
        """
        path = self._path(key)
        with self._explained(key):
            found = next(iter(self._api.get_bucket_paths_info(self._id, [path])), None)
            if found is None:
                raise EntryNotFoundError(path)
            self._check_limit(key, found.size, limit)
            with _base.replacing(dest) as temporary:  # the client empties a file before it fails
                self._api.download_bucket_files(self._id, [(found, temporary)])
                return _base.file_sha256(temporary)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        paths = [self._path(key) for key in keys]
        with self._explained(keys[0] if keys else "", write=True):
            self._api.batch_bucket_files(self._id, delete=paths)

    def notifications(self, prefix: str) -> Notifications:
        """From the Hub's feed."""
        folder = self._folder + _base.check_prefix(prefix)
        return HubNotifications(self._api.endpoint, self._id, folder, _quotas[self._id])

    def _put(self, key: str, data: bytes | Path) -> None:
        self._api.batch_bucket_files(self._id, add=[(data, self._path(key))])

    def _stat(self, key: str) -> _base.ObjectInfo:
        """One request with the HTTP method HEAD."""
        found = self._api.get_bucket_file_metadata(self._id, self._path(key))
        return _base.ObjectInfo(key, found.size, found.xet_file_data.file_hash)

    def _list(self, prefix: str) -> Iterator[_base.ObjectInfo]:
        """The Hub matches prefixes as plain text: "a/b" also finds "a/bc/x". Keep what lies in the folder."""
        folder = self._folder + prefix
        for entry in self._api.list_bucket_tree(self._id, folder.rstrip("/"), recursive=True):
            if entry.type == "file" and entry.path.startswith(folder):
                written = entry.uploaded_at.timestamp() if entry.uploaded_at else None
                key = entry.path.removeprefix(self._folder)
                yield _base.ObjectInfo(key, entry.size, entry.xet_hash, written)

    def _path(self, key: str) -> str:
        return self._folder + _base.check_key(key)

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        if isinstance(error, EntryNotFoundError):
            return errors.ObjectMissingError(f"{place} does not exist")
        # hf_xet raises Python's built-in errors, which do not tell a refusal from an outage: ask the Hub.
        cause = error if isinstance(error, HTTPError) else self._probe(write)
        if isinstance(cause, HfHubHTTPError):
            return self._refusal(cause, place, write)
        if cause:
            return errors.BucketUnreachableError(
                f"{self._api.endpoint} gave no answer for {place} ({type(cause).__name__}): check the network"
                " and HF_ENDPOINT, and try again later"
            )
        return errors.BucketUnreachableError(
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

    def _refusal(self, error: HfHubHTTPError, place: str, write: bool) -> errors.BucketError:
        status, right = error.response.status_code, "write" if write else "read"
        if status in (401, 403):
            why = "this token may not" if status == 403 else "the token is wrong or expired"
            why = why if get_token() else "HF_TOKEN is not set"
            return errors.AccessDeniedError(
                f"the Hub refused {right} access to {place} ({status}, {why}): set HF_TOKEN to a token with"
                f" {right} access to {self._id}"
            )
        if status == 404:
            return errors.BucketMissingError(
                f"{self.url} does not exist or is hidden from this token: create it with `hf buckets create"
                f" {self._id}`, or set HF_TOKEN to a token that may see it"
            )
        if status in (408, 429) or status >= 500:
            return errors.BucketUnreachableError(
                f"the Hub still answered {status} for {place} after several tries: try again later"
            )
        return errors.BucketError(f"the Hub refused {place} ({_reason(error)}): correct the request")


def _reason(error: Exception) -> str:
    """A library's message in one line, without signed query strings and without the token."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split()))
    if token := get_token():
        text = text.replace(token, "***")
    return f"{type(error).__name__}: {text}"[:300]
