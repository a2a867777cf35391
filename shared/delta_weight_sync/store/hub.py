"""A bucket on the Hugging Face Hub, through huggingface_hub's own bucket functions.

The token comes from HF_TOKEN or the Hub's login, the endpoint from HF_ENDPOINT. This module limits the time
of its requests, and notes what the answers say about the quota. It changes no setting of huggingface_hub, and
no environment variable. A failing request is retried for up to a minute before it becomes a
`BucketUnreachableError`. If a server accepts requests and never answers, a call takes 1.5 minutes; if the
storage stalls during a transfer, a call takes up to twelve minutes.

Storing a version takes one upload and one request, which registers all objects in order. Small objects are
read by their URL (docs/wire-format.md), large objects through Xet, many parts at a time. Notifications come
from the Hub's feed of a bucket's changes, which consists of server-sent events.
"""

import contextlib
import json
import os
import random
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from hf_xet import SKIP_SHA256, XetConfig, XetFileInfo, XetSession
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version uses
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    http_backoff,
    http_stream_backoff,
    parse_ratelimit_headers,
)

from delta_weight_sync import errors, store
from delta_weight_sync.store.hooks import BUCKETS
from delta_weight_sync.store.ledger import Kind, Ledger, kind_of
from delta_weight_sync.store.notifications import Notifications, Quota, Why
from delta_weight_sync.util import SafeLogger

with BUCKETS.imports():  # private names, which another release may lack
    from huggingface_hub._buckets import _BucketAddFile
    from huggingface_hub.utils import _http
    from huggingface_hub.utils._xet import (
        XET_CONNECTION_INFO_CACHE,
        XetFileData,
        refresh_xet_connection_info,
        xet_headers_without_auth,
    )

REQUEST_TIMEOUT = 10.0  # seconds; by default the client waits forever
LONGEST_PAUSE = 10  # seconds; a server may ask for a longer pause, even for hours, and the client would obey
FAILURES = (OSError, RuntimeError, ValueError, HTTPError, EntryNotFoundError)  # what the libraries raise

# The first two settings shorten hf_xet's retries, which take up to six minutes by default. hf_xet's read
# timeout stays at five minutes per attempt, because the timeout also runs while a block of 64 MB is sent. The
# last setting saves one request per upload. A variable of the environment, such as
# HF_XET_CLIENT_RETRY_MAX_DURATION, takes precedence.
_XET_SETTINGS: Final[Mapping[str, Any]] = {
    "client.retry_base_delay": "2s",
    "client.retry_max_duration": "16s",
    "telemetry.enabled": False,
}
_READS: Final = 3  # attempts to read an object by its URL, if connections break within the body
CONNECT_S: Final = 10.0  # seconds to connect to the feed
SILENCE_S: Final = 90.0  # a feed without a byte for this long counts as dead
STEADY_S: Final = 60.0  # after a connection that lasted this long, reconnect within a second
# The pause after a connection that was shorter. Each further short one doubles the pause, up to a limit.
FIRST_FEED_PAUSE_S = 5.0
LONGEST_FEED_PAUSE_S = 320.0

_quotas: defaultdict[str, Quota] = defaultdict(Quota)  # by bucket: what the Hub says of the token's quota


class _Account(NamedTuple):
    """What the next requests of a thread count to."""

    ledger: Ledger
    kind: Kind
    quota: Quota


_account: ContextVar[_Account | None] = ContextVar("_account", default=None)
_hooking = threading.Lock()
_adding = threading.Lock()
_log = SafeLogger()


@cache
def _xet_session(_process: int, *, ask_storage: bool) -> XetSession:
    """Return the session of a process with the Hub's storage; a forked process gets its own. If
    `ask_storage`, uploads first ask which parts of the objects the storage already has."""
    config = XetConfig()
    for name, value in _XET_SETTINGS.items():
        if f"HF_XET_{name.upper().replace('.', '_')}" not in os.environ:
            config = config.with_config(name, value)
    return XetSession(config.with_config("deduplication.global_dedup_query_enabled", ask_storage))


def for_each_client(change: Callable[[Any], None]) -> None:
    """Call `change` with the client of huggingface_hub, which all code of this process shares, and with each
    later one: huggingface_hub makes a new client after a failed connection. `change` may be called again with
    the same client. A client factory that the program has set stays in use."""
    with _hooking:
        make = _http._GLOBAL_CLIENT_FACTORY
        changes = getattr(make, "changes", ())
        if change not in changes:

            def made() -> Any:
                client = make()
                change(client)
                return client

            made.changes = (*changes, change)  # type: ignore[attr-defined]
            _http._GLOBAL_CLIENT_FACTORY = made
    change(get_session())


def _hook(client: Any) -> None:
    """Add hooks to a client. They act only on requests of a `HubBucket`: while `_account` is set."""
    with _adding:
        hooks = client.event_hooks
        if _limit_time not in hooks["request"]:
            before = hooks["request"]
            after = hooks["response"]
            client.event_hooks = {"request": [*before, _limit_time], "response": [*after, _note_answer]}


def _limit_time(request: Any) -> None:
    if _account.get():
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), REQUEST_TIMEOUT)


def _note_answer(response: Any) -> None:
    """Count the request, and note the quota. If a busy server asks for a long pause, shorten the pause: the
    client would obey."""
    if not (account := _account.get()):
        return
    account.ledger.add(account.kind, requests=1)
    quota = account.quota
    headers = response.headers
    said = parse_ratelimit_headers(headers)
    if response.status_code == 429:
        quota.refused(_retry_after_s(headers))
    elif said and said.resource_type == "resolvers":  # the quota of reads by URL, such as polls
        quota.left(said.remaining, said.reset_in_seconds)
    if response.status_code in (429, 503):
        headers.pop("ratelimit", None)  # this header asks for a pause, too
        asked = headers.get("retry-after", "")
        headers["retry-after"] = str(min(int(asked), LONGEST_PAUSE)) if asked.isdecimal() else ""


def _retry_after_s(headers: Any) -> float | None:
    """Return the seconds for which an answer asks the client to stay away; None if it names no time."""
    retry_after = headers.get("retry-after", "")
    quota = parse_ratelimit_headers(headers)
    if retry_after.isdecimal():
        return float(retry_after)
    return float(quota.reset_in_seconds) if quota else None


class HubBucket(store.Bucket):
    """See `delta_weight_sync.store.Bucket`. An etag is the Xet hash of the content."""

    report_every_s = 10.0
    _counts_requests = True
    copies_from_hub = True
    _failures = FAILURES

    def __init__(self, url: str, *, create: bool = False) -> None:
        match = re.fullmatch(r"hf://buckets/([\w.-]+/[\w.-]+)(?:/(.*?))?/?", url)
        if not match:
            raise errors.BucketError(
                f"{url!r} is not a Hub bucket: write hf://buckets/<owner>/<name>[/<prefix>]"
            )
        super().__init__(url)
        self._id = match[1]
        self._folder = f"{store.check_key(match[2])}/" if match[2] else ""
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        if create:
            with self._explained("", write=True):
                self._api.create_bucket(self._id, private=True, exist_ok=True)

    def upload(self, key: str, data: bytes) -> str:
        """As in `Bucket`. The receipt is the Xet hash. If no `put_all` follows, the Hub forgets the data."""
        store.check_key(key)
        self.ledger.add(kind_of(key), sent=len(data))
        return self._upload([(key, data)])[key]

    def put_all(self, objects: store.Objects, receipts: Mapping[str, str] | None = None) -> None:
        """As in `Bucket`, with one upload and one request. The answer proves that all objects are stored."""
        for key, data in objects:
            self.ledger.add(kind_of(key), sent=store.size_of(data))
        uploaded = self._upload(objects) if objects else {}
        if hashes := {**(receipts or {}), **uploaded}:
            self._register(hashes)

    def _upload(self, objects: store.Objects) -> dict[str, str]:
        """Upload objects in one go. Returns the Xet hash of each key's object."""
        headers = build_hf_headers()
        url = f"{self._api.endpoint}/api/buckets/{self._id}/xet-write-token"
        with self._explained(objects[-1][0], write=True):
            storage = refresh_xet_connection_info(file_data=XetFileData("", url), headers=headers)
            on_disk = isinstance(objects[0][1], Path)  # such as weights: the storage may have parts of them
            try:
                with _xet_session(os.getpid(), ask_storage=on_disk).new_upload_commit(
                    endpoint=storage.endpoint,
                    token=storage.access_token,
                    token_expiry_unix_secs=storage.expiration_unix_epoch,
                    token_refresh_url=url,
                    token_refresh_headers=headers,
                ) as commit:
                    sent = {
                        key: commit.start_upload_bytes(data, sha256=SKIP_SHA256)
                        if isinstance(data, bytes)
                        else commit.start_upload_file(str(data), sha256=SKIP_SHA256)
                        for key, data in objects
                    }
            except FAILURES:
                XET_CONNECTION_INFO_CACHE.clear()  # the storage may have refused the token
                raise
            return {key: upload.result().xet_info.hash for key, upload in sent.items()}

    def _register(self, hashes: Mapping[str, str]) -> None:
        """Store uploaded objects under their keys, in the order of `hashes`."""
        files = [_BucketAddFile(b"", self._path(key), xet_hash) for key, xet_hash in hashes.items()]
        with self._explained([*hashes][-1], write=True):
            self._api.batch_bucket_files(self._id, add=files)  # type: ignore[arg-type]

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """As in `Bucket`. Large objects come through Xet; for these, a full disk is a `BucketError`."""
        if limit <= store.DIRECT:
            return super().fetch(key, dest, limit)
        path = self._path(key)
        with store.replacing(dest) as temporary, self._explained(key):  # a failure must not change `dest`
            found = next(iter(self._api.get_bucket_paths_info(self._id, [path])), None)
            if found is None:
                raise EntryNotFoundError(path)
            self._check_limit(key, found.size, limit)
            self.ledger.add(kind_of(key), received=found.size)
            self._download([(found, temporary)])
            # The client cannot hash bytes while it downloads them; the page cache still has the bytes.
            return store.file_sha256(temporary)

    def fetch_together(self, wanted: Sequence[tuple[str, Path, int]]) -> None:
        """As in `Bucket`: all large objects, with three requests to the Hub."""
        large = {self._path(key): (dest, limit) for key, dest, limit in wanted if limit > store.DIRECT}
        if len(large) < 2:  # for a single object, `fetch` makes equally few requests
            return
        with contextlib.ExitStack() as stack, self._explained(wanted[0][0]):
            files: list[tuple[Any, Any]] = [
                (found, stack.enter_context(store.replacing(large[found.path][0])))
                for found in self._api.get_bucket_paths_info(self._id, [*large])
                if found.size <= large[found.path][1]
            ]
            for found, _ in files:
                self.ledger.add(kind_of(found.path.removeprefix(self._folder)), received=found.size)
            self._download(files)

    def _download(self, files: Sequence[tuple[Any, Path]]) -> None:
        """Download large objects (huggingface_hub's descriptions of them) to files. Its own function for this
        would use a session that all programs of this process share, and print progress bars."""
        if not files:
            return
        first, _ = files[0]
        token_url = self._api.get_bucket_file_metadata(self._id, first.path).xet_file_data.refresh_route
        headers = build_hf_headers()
        with _xet_session(os.getpid(), ask_storage=False).new_file_download_group(
            token_refresh_url=token_url,
            token_refresh_headers=headers,
            custom_headers=xet_headers_without_auth(headers),
        ) as group:
            for found, path in files:
                if found.size:
                    group.start_download_file(XetFileInfo(found.xet_hash, found.size), str(path))
                else:
                    path.touch()

    def stat_all(self, keys: Sequence[str]) -> dict[str, store.ObjectInfo]:
        """As in `Bucket`, with one request for up to 1,000 objects."""
        paths = [self._path(key) for key in keys]
        with self._explained(keys[0] if keys else "", kind="polls"):
            found = [*self._api.get_bucket_paths_info(self._id, paths)] if paths else []
        infos = (
            store.ObjectInfo(each.path.removeprefix(self._folder), each.size, each.xet_hash) for each in found
        )
        return {info.key: info for info in infos}

    @contextlib.contextmanager
    def _explained(self, key: str, *, write: bool = False, kind: Kind | None = None) -> Iterator[None]:
        """As in `Bucket`. The requests that this thread makes meanwhile count to the object's kind."""
        kind = kind or kind_of(key)
        with self._counted(kind), super()._explained(key, write=write, kind=kind):
            yield

    @contextlib.contextmanager
    def _counted(self, kind: Kind) -> Iterator[None]:
        """Count the requests that this thread makes meanwhile to `kind`."""
        for_each_client(_hook)
        before = _account.get()
        _account.set(_Account(self.ledger, kind, _quotas[self._id]))
        try:
            yield
        finally:
            _account.set(before)

    def _read(self, key: str, limit: int) -> list[bytes]:
        """Read an object by its URL, into memory."""
        url = f"{self._api.endpoint}/buckets/{self._id}/resolve/{quote(self._path(key), safe='')}"
        # A compressed body may unpack to any size, so ask for an uncompressed one.
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        for _ in range(_READS):
            with http_stream_backoff("GET", url, headers=headers, timeout=REQUEST_TIMEOUT) as answer:
                if answer.history and answer.is_error:  # the Hub had redirected this request to the storage
                    raise OSError(f"the storage answered {answer.status_code}")
                hf_raise_for_status(answer)
                self._check_limit(key, int(answer.headers.get("content-length", 0)), limit)
                data = bytearray()
                with contextlib.suppress(HTTPError):  # the connection broke: try again
                    for part in answer.iter_bytes():
                        data += part
                        self._check_limit(key, len(data), limit)
                    return [bytes(data)]
        raise OSError("the connection broke several times")

    def _delete(self, keys: Sequence[str]) -> None:
        self._api.batch_bucket_files(self._id, delete=[self._path(key) for key in keys])

    def find_on_hub(self, model: str, revision: str, names: Sequence[str]) -> dict[str, store.HubFile]:
        """As in `Bucket`, with one request. It is not for a bucket, so it gets its limit of time here."""
        url = f"{self._api.endpoint}/api/models/{model}/paths-info/{revision}"
        asked = {"paths": [*names], "expand": False}
        limits: dict[str, Any] = {"timeout": REQUEST_TIMEOUT, "retry_on_status_codes": ()}
        files = dict[str, store.HubFile]()
        try:
            with self._counted("anchors"):
                answer = http_backoff("POST", url, data=asked, headers=build_hf_headers(), **limits)
            hf_raise_for_status(answer)
            found = {entry["path"]: entry for entry in answer.json()}
            for name in names:
                entry = found.get(name, {})
                sha256 = (entry.get("lfs") or {}).get("oid", "")
                xet_hash = entry.get("xetHash")
                if not re.fullmatch("[0-9a-f]{64}", sha256) or not xet_hash:
                    raise errors.BucketError(f"{name} of {model} is not in the Hub's Xet storage")
                files[name] = store.HubFile(entry["size"], sha256, xet_hash)
        # The last three: an answer of another form.
        except (*FAILURES, AttributeError, LookupError, TypeError) as error:
            raise errors.BucketError(
                f"the Hub did not describe the files of {model} ({_reason(error)})"
            ) from error
        return files

    def copy_from_hub(self, model: str, files: Mapping[str, store.HubFile]) -> None:
        """As in `Bucket`, with two requests: the second one shows what the bucket has then."""
        wanted = {self._path(key): file for key, file in files.items()}
        copies = [("model", model, file.xet_hash, path) for path, file in wanted.items()]
        try:
            with self._counted("anchors"):
                self._api.batch_bucket_files(self._id, copy=copies)
                there = {file.path: file for file in self._api.get_bucket_paths_info(self._id, [*wanted])}
        except FAILURES as error:
            raise errors.BucketError(
                f"the Hub did not copy the files of {model} ({_reason(error)})"
            ) from error
        for path, file in wanted.items():
            found = there.get(path)
            if found is None or (found.size, found.xet_hash) != (file.size, file.xet_hash):
                raise errors.BucketError(f"the Hub stored another {path} than that of {model}")

    def notifications(self, prefix: str) -> Notifications:
        """As in `Bucket`, from the Hub's feed."""
        store.check_prefix(prefix)
        url = f"{self._api.endpoint}/api/buckets/{self._id}/events"
        return HubNotifications(url, self._folder, prefix, _quotas[self._id])

    def _put(self, key: str, data: bytes | Path) -> None:
        self._register(self._upload([(key, data)]))

    def _stat(self, key: str) -> store.ObjectInfo:
        found = self._api.get_bucket_file_metadata(self._id, self._path(key))
        return store.ObjectInfo(key, found.size, found.xet_file_data.file_hash)

    def _list(self, prefix: str) -> Iterator[store.ObjectInfo]:
        """The Hub matches prefixes as plain text: "a/b" also finds "a/bc/x". Keep what lies in the folder."""
        folder = self._folder + prefix
        for entry in self._api.list_bucket_tree(self._id, folder.rstrip("/"), recursive=True):
            if entry.type == "file" and entry.path.startswith(folder):
                written = entry.uploaded_at.timestamp() if entry.uploaded_at else None
                key = entry.path.removeprefix(self._folder)
                yield store.ObjectInfo(key, entry.size, entry.xet_hash, written)

    def _path(self, key: str) -> str:
        return self._folder + store.check_key(key)

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        if isinstance(error, EntryNotFoundError):
            return errors.ObjectMissingError(f"{place} does not exist")
        if isinstance(error, HfHubHTTPError):
            return self._refusal(error, place, write)
        # The Hub may have refused the request, or the Hub or its storage may be down. So ask the Hub.
        try:
            self._api.bucket_info(self._id)
        except HfHubHTTPError as cause:
            return self._refusal(cause, place, write)
        except FAILURES as cause:
            return errors.BucketUnreachableError(
                f"{self._api.endpoint} gave no answer for {place} ({type(cause).__name__}): check the network"
                " and HF_ENDPOINT, and try again later"
            )
        return errors.BucketUnreachableError(
            f"{place} could not be transferred although the Hub answers ({_reason(error)}): check this"
            " machine's free disk space and its connection to the Hub's storage, and try again later"
        )

    def _refusal(self, error: HfHubHTTPError, place: str, write: bool) -> errors.BucketError:
        status = error.response.status_code
        right = "write" if write else "read"
        if status in (401, 403):
            why = f"this token has no {right} access" if status == 403 else "the token is wrong or expired"
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
        return errors.BucketError(f"the Hub refused access to {place} ({_reason(error)}): report this bug")


def _reason(error: Exception) -> str:
    """A library's message in one line, without signed query strings and without the token."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split()))
    if token := get_token():
        text = text.replace(token, "***")
    return f"{type(error).__name__}: {text}"[:300]


class HubNotifications(Notifications):
    """Notifications from the Hub's feed, if it has one."""

    def __init__(self, url: str, folder: str, prefix: str, quota: Quota) -> None:
        """`url` is the URL of the feed. Only changes below `prefix`, in the bucket's `folder`, count."""
        super().__init__(quota)
        self._url = url
        self._folder = folder
        self._prefix = prefix
        self._cursor = ""
        self._connection: socket.socket | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def due(self, poll_s: float) -> Why | None:
        """As in `Notifications`; the first call connects."""
        why = super().due(poll_s)
        if self._thread is None:  # connect; the feed's event "ready" then causes one more look
            self._thread = threading.Thread(target=self._run, name="bucket-events", daemon=True)
            self._thread.start()
        return why

    def close(self) -> None:
        """As in `Notifications`; ends the connection."""
        super().close()
        self._done.set()
        if self._connection:
            with contextlib.suppress(OSError):  # the connection has ended already
                self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread:
            self._thread.join(CONNECT_S)

    def _run(self) -> None:
        """Keep a connection to the feed. While there is no connection, the caller polls."""
        failures = 0
        while not self._done.is_set():
            started = time.monotonic()
            pause_s = 0.0
            try:
                pause_s = self._follow()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next connection may be better
                _log.debug("the feed at %s ended: %r", self._url, error)
            self.rely(False)
            failures = 0 if time.monotonic() - started >= STEADY_S else failures + 1
            self._done.wait(max(_pause_s(failures), min(pause_s, LONGEST_FEED_PAUSE_S)))

    def _follow(self) -> float:
        """Follow one connection to its end; return the seconds to wait that the Hub asked for."""
        headers = {**build_hf_headers(), "accept": "text/event-stream"}
        cursor = {"cursor": self._cursor} if self._cursor else {}
        limits = (CONNECT_S, SILENCE_S, CONNECT_S, CONNECT_S)  # connect, read, write, wait for a connection
        with get_session().stream("GET", self._url, headers=headers, params=cursor, timeout=limits) as answer:
            if answer.status_code != 200 or "event-stream" not in answer.headers.get("content-type", ""):
                self._cursor = ""  # the cursor may be the reason for the refusal
                return _retry_after_s(answer.headers) or 0.0
            stream = answer.extensions.get("network_stream")
            self._connection = stream.get_extra_info("socket") if stream else None
            for name, data in _events(answer.iter_bytes()):
                payload: object = None
                with contextlib.suppress(ValueError):  # an event that this reader does not know
                    payload = json.loads(data)
                if self._done.is_set() or not self._take(name, payload if isinstance(payload, dict) else {}):
                    break
        return 0.0

    def _take(self, name: str, payload: dict[str, Any]) -> bool:
        """Act on an event. Return False if it is the last event of its connection."""
        resumed = bool(self._cursor)
        self._cursor = str(payload.get("cursor") or self._cursor)
        if name == "ready":
            self.rely(True)
            if not resumed:
                self.report()  # there may have been changes before this connection
        elif name == "changes":
            for change in filter(lambda change: isinstance(change, dict), payload.get("changes") or ()):
                path = change.get("path", "")
                etag = change.get("xetHash")
                seen = self.known.get(path.removeprefix(self._folder))  # the etag that the last look found
                if path.startswith(self._folder + self._prefix) and (not etag or etag != seen):
                    self.report()
        elif name == "reset":
            self._cursor = ""
        return name not in ("reset", "reconnect")


def _events(chunks: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """The name and the data of each server-sent event of a stream."""
    name = "message"
    data = list[bytes]()
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in (line.rstrip(b"\r") for line in lines):
            field, _, value = line.partition(b":")
            if field == b"event":
                name = value.strip().decode()
            elif field == b"data":
                data.append(value)
            elif not line:  # the end of an event; a line that begins with a colon is a comment
                if data:
                    yield name, b"\n".join(data)
                name = "message"
                data = []


def _pause_s(failures: int) -> float:
    """Seconds before the next connection; random, because many clients may be disconnected together."""
    usual = FIRST_FEED_PAUSE_S * 2.0 ** min(failures - 1, 30) if failures else 1.0  # 30: no overflow
    return min(usual, LONGEST_FEED_PAUSE_S) * random.uniform(0.5, 1.0)
