"""The simulated Hub of a fleet, and its clients: they make the real clients' requests, in simulated time.

`tests/bench/test_fleet.py` compares these requests with those of the real clients at the simulated Hub.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.fleet.clock import Clock, Event, Pipe
from delta_weight_sync import errors, store
from delta_weight_sync.store.hub import HubNotifications, Quota
from delta_weight_sync.store.ledger import kind_of
from delta_weight_sync.store.notifications import Notifications

WINDOW_S = 300.0
BLOCK = 64 << 20  # bytes of the largest block that hf_xet uploads
_TOKEN_S = 3600.0  # a token to upload is valid for this long
_PAGE = 1000  # entries in one answer of a listing
_PAUSES = (1, 2, 4, 8, 8)  # seconds between the client's attempts (huggingface_hub's `http_backoff`)


class StandIn(bytes):
    """Stands for a large object of `size` bytes, which holds the changes of `syncs` syncs."""

    size: int
    syncs: float

    @classmethod
    def of(cls, content: bytes, size: float, syncs: float = 0.0) -> StandIn:
        """Make one."""
        made = cls(content)
        made.size = int(size)
        made.syncs = syncs
        return made

    def __len__(self) -> int:
        return self.size


class Limits(NamedTuple):
    """Requests that the Hub allows one account in five minutes; it refuses further ones."""

    files: float = math.inf
    api: float = math.inf


UNLIMITED = Limits()


@dataclass(frozen=True)
class Link:
    """How a machine reaches the store. `pipe` may be shared with other machines."""

    latency: float  # seconds that a request takes in addition to its bytes
    pipe: Pipe
    core: Pipe | None = None  # a CPU core that clients share: a pipe that "transfers" one second each second
    core_s: float = 0.0  # seconds of this core that each request takes


@dataclass(frozen=True)
class OneMachine:
    """What was measured of a run whose bucket is a folder on the same machine (`make demo`).

    Each field has times in seconds; the simulator draws one of them, all equally likely.
    """

    publishes: tuple[float, ...]  # from the hand-over until HEAD is stored: diff, encoding and three writes
    reads: tuple[float, ...]  # of a file in the folder
    pokes: tuple[float, ...]  # from the request until the answer
    stages: tuple[float, ...]
    commits: tuple[float, ...]
    steps: tuple[float, ...]  # of vLLM


class Hub:
    """The simulated server: objects, counts of requests, and events."""

    def __init__(self, clock: Clock, rng: random.Random, limits: Limits, event_s: float, lost: float) -> None:
        """An event comes within `event_s` seconds; a share `lost` of them never comes."""
        self.clock = clock
        self.limits = limits
        self.rng = rng
        self._event_s = event_s
        self._lost = lost
        self.objects: dict[str, tuple[bytes, store.ObjectInfo]] = {}
        self.uploaded: dict[str, bytes] = {}  # not yet stored under their keys
        self.kinds = Counter[tuple[str, str]]()  # (role, request) -> how many
        self.windows = Counter[tuple[int, str]]()  # (window, quota) -> requests, also refused ones
        self.received = Counter[str]()  # role -> bytes that came from the store
        self.refused = 0
        self.down = False
        self.syncs = dict[str, float]()  # last part of a delta's key -> how many syncs the delta holds
        self.heads: list[tuple[str, str]] = []  # every change of a HEAD: path and etag
        self.feeds: dict[Feed, int] = {}  # how many of these changes each feed has got

    def answer(self, quota: str) -> tuple[float, float, bool]:
        """Count a request. Return how many are left for how many seconds, and whether this one is allowed."""
        window, into = divmod(self.clock.now, WINDOW_S)
        self.windows[int(window), quota] += 1
        left = getattr(self.limits, quota, math.inf) - self.windows[int(window), quota]
        self.refused += left < 0
        return left, WINDOW_S - into, left >= 0

    def put(self, key: str, data: bytes) -> None:
        """Store an object. If it is a HEAD, send an event to each feed; some events are lost."""
        size = len(data)
        etag = f"{self.clock.now:.9f}.{key}"
        if isinstance(data, StandIn):
            self.syncs[key.rsplit("/", 1)[-1]] = data.syncs
        self.objects[key] = data, store.ObjectInfo(key, size, etag, self.clock.now)
        if "/heads/" in key:
            self.heads.append((key, etag))
            for feed in list(self.feeds):
                if self.rng.random() >= self._lost:
                    self.clock.call(self.rng.uniform(0, self._event_s), feed.arrived.set)

    def reset_counts(self) -> None:
        """Set all counts to 0."""
        for counter in (self.kinds, self.windows, self.received):
            counter.clear()
        self.refused = 0

    def stored(self) -> int:
        """Bytes of all objects."""
        return sum(info.size for _, info in self.objects.values())

    def outage(self, start_s: float, seconds: float) -> None:
        """Answer nothing for a while, beginning in `start_s` seconds."""

        def switch(down: bool) -> None:
            self.down = down
            for feed in list(self.feeds):
                feed.arrived.set()

        self.clock.call(start_s, lambda: switch(True))
        self.clock.call(start_s + seconds, lambda: switch(False))


class Feed(HubNotifications):
    """The client's side of the feed of changes; only the connection is simulated."""

    def __init__(self, bucket: SimBucket, prefix: str) -> None:
        super().__init__("", "", prefix, bucket.quota)
        self._clock = bucket.hub.clock.seconds
        self._bucket = bucket
        self.arrived = Event(bucket.hub.clock)

    def _follow(self) -> float:
        hub = self._bucket.hub
        bucket = self._bucket
        bucket.request("GET /api/buckets/.../events", "api", tries=1)
        if not bucket.events:
            return 0.0
        hub.feeds[self] = int(self._cursor or len(hub.heads))
        try:
            going = self._take("ready", {"cursor": str(hub.feeds[self])})
            while going and not hub.down:
                for path, etag in hub.heads[hub.feeds[self] :]:
                    hub.feeds[self] += 1
                    change = {"path": path, "xetHash": etag}
                    going = self._take("changes", {"cursor": str(hub.feeds[self]), "changes": [change]})
                self.arrived.clear()
                self.arrived.wait()
        finally:
            hub.feeds.pop(self, None)
        return 0.0


class SimBucket(store.Bucket):
    """The client of one machine, see `store.hub.HubBucket`."""

    report_every_s = 10.0
    _failures = ()

    def __init__(self, hub: Hub, link: Link, role: str, events: bool = True) -> None:
        super().__init__("hf://buckets/team/fleet")
        self.hub = hub
        self.link = link
        self.role = role
        self.events = events
        self.quota = Quota(hub.clock.seconds)
        self._token_until = 0.0
        self._fetched = set[str]()

    def request(self, name: str, quota: str, size: float = 0.0, tries: int = len(_PAUSES) + 1) -> None:
        """Make a request that transfers `size` bytes, with the retries of huggingface_hub."""
        for attempt in range(tries):
            if attempt:
                self.hub.clock.sleep(_PAUSES[attempt - 1])
            self.hub.kinds[self.role, name] += 1
            self.hub.clock.sleep(self.link.latency)
            if self.link.core:
                self.link.core.send(self.link.core_s)
            if self.hub.down:
                continue
            left, seconds, allowed = self.hub.answer(quota)
            if not allowed:
                self.quota.refused(seconds)
                continue
            if quota == "files" and left < math.inf:
                self.quota.left(int(left), seconds)
            if size:
                self.link.pipe.send(size)
            return
        raise errors.BucketUnreachableError("the Hub gave no answer after several tries")

    def upload(self, key: str, data: bytes) -> str:
        """As in `HubBucket`, with one upload. The hub keeps the content until `put_all` names its key."""
        self.ledger.add(kind_of(key), sent=len(data))
        self._upload([(key, data)])
        self.hub.uploaded[key] = data
        return key

    def put_all(
        self, objects: Sequence[tuple[str, bytes | Path]], receipts: Mapping[str, str] | None = None
    ) -> None:
        """As in `HubBucket`, with one upload and one request."""
        for key, data in objects:
            self.ledger.add(kind_of(key), sent=store.size_of(data))
        self._store(objects, receipts)

    def _store(self, objects: store.Objects, receipts: Mapping[str, str] | None = None) -> None:
        self._upload(objects)
        self.request("POST /api/buckets/.../batch", "api")
        for key in receipts or ():
            self.hub.put(key, self.hub.uploaded.pop(key))
        for key, data in objects:
            self.hub.put(key, data if isinstance(data, bytes) else stand_in(data))

    def _upload(self, objects: Sequence[tuple[str, bytes | Path]]) -> None:
        size = sum(store.size_of(data) for _, data in objects)
        blocks = max(1, math.ceil(size / BLOCK))
        kinds = self.hub.kinds
        if self.hub.clock.now >= self._token_until:
            self.request("GET /api/buckets/.../xet-write-token", "api")
            self._token_until = self.hub.clock.now + _TOKEN_S
        names = ["POST /cas/v1/xorb-grants", "PUT /cas/granted", "POST /cas/v1/xorb-commits"]
        if isinstance(objects[0][1], Path):
            names.insert(0, "GET /cas/v1/chunks")
        for name in names:  # blocks travel in parallel, so only the first block's request takes time
            self.request(name, "storage", size if name.startswith("PUT") else 0.0)
            kinds[self.role, name] += blocks - 1
        self.request("POST /cas/v2/shards", "storage")

    def get(self, key: str, limit: int = store.SMALL) -> bytes:
        """Read an object by its URL."""
        (data,) = self._read(key, limit)
        return data

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """Read an object by its URL or, if it may be large, through Xet. Writes no file."""
        if limit <= store.DIRECT:
            (data,) = self._read(key, limit)
            return hashlib.sha256(data).hexdigest()
        if key not in self._fetched:
            self._download([key])
        self._fetched.discard(key)
        return hashlib.sha256(self._found(key)[0]).hexdigest()

    def fetch_together(self, wanted: Sequence[tuple[str, Path, int]]) -> None:
        """As in `HubBucket`, but writes no file. The next `fetch` of a large object then makes no request."""
        large = [key for key, _, limit in wanted if limit > store.DIRECT]
        if len(large) > 1:
            self._download(large)
            self._fetched.update(large)

    def _download(self, keys: list[str]) -> None:
        """Download objects through Xet, all at the same time."""
        self.request("POST /api/buckets/.../paths-info", "api")
        sizes = [self._found(key)[1] for key in keys]
        self.request("HEAD /buckets/...", "files")
        self.request("GET /api/buckets/.../xet-read-token", "api")
        self.request("GET /cas/v2/reconstructions", "storage")
        self.request("GET /cas/data", "storage", sum(sizes))
        kinds = self.hub.kinds
        kinds[self.role, "GET /cas/v2/reconstructions"] += len(keys) - 1
        kinds[self.role, "GET /cas/data"] += sum(math.ceil(size / BLOCK) for size in sizes) - 1
        self.hub.received[self.role] += sum(sizes)

    def notifications(self, prefix: str) -> Any:
        """As in `HubBucket`. If `events` is False, the hub refuses the feed's connection."""
        return Feed(self, prefix)

    def _found(self, key: str) -> tuple[bytes, int]:
        if key not in self.hub.objects:
            raise errors.ObjectMissingError(f"{key} does not exist")
        data, info = self.hub.objects[key]
        return data, info.size

    def _read(self, key: str, limit: int) -> list[bytes]:
        self.request("GET /buckets/...", "files")
        data, size = self._found(key)
        self.request("GET /cas-bridge/...", "storage", size if size <= limit else 0.0)
        self._check_limit(key, size, limit)
        self.hub.received[self.role] += size
        return [data]

    def _put(self, key: str, data: bytes | Path) -> None:
        self._store([(key, data)])

    def _stat(self, key: str) -> store.ObjectInfo:
        self.request("HEAD /buckets/...", "files")
        self._found(key)
        return self.hub.objects[key][1]

    def _list(self, prefix: str) -> Iterator[store.ObjectInfo]:
        found = [info for key, (_, info) in self.hub.objects.items() if key.startswith(prefix)]
        for _ in range(max(1, math.ceil(len(found) / _PAGE))):
            self.request("GET /api/buckets/.../tree", "api")
        yield from found

    def _delete(self, keys: Sequence[str]) -> None:
        self.request("POST /api/buckets/.../batch", "api")
        for key in keys:
            self.hub.objects.pop(key, None)

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        raise error


class FolderBucket(SimBucket):
    """The client of a folder, see `store._files.FileBucket`."""

    report_every_s = 1.0
    upload = store.Bucket.upload
    put_all = store.Bucket.put_all
    fetch_together = store.Bucket.fetch_together

    def __init__(self, hub: Hub, machine: OneMachine, role: str) -> None:
        super().__init__(hub, Link(0.0, Pipe(hub.clock, math.inf)), role)
        self._machine = machine

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """Writes nothing."""
        return hashlib.sha256(self._read(key, limit)[0]).hexdigest()

    def notifications(self, prefix: str) -> Notifications:
        """None come, except pokes."""
        return Notifications(self.quota, self.hub.clock.seconds)

    def _access(self, name: str, times: Sequence[float]) -> None:
        self.hub.kinds[self.role, name] += 1
        self.hub.clock.sleep(self.hub.rng.choice(times))

    def _read(self, key: str, limit: int) -> list[bytes]:
        self._access("read", self._machine.reads)
        data, size = self._found(key)
        self._check_limit(key, size, limit)
        self.hub.received[self.role] += size
        return [data]

    def _put(self, key: str, data: bytes | Path) -> None:
        # Only HEAD takes time: the whole time of its version.
        self._access("write", self._machine.publishes if "/heads/" in key else (0.0,))
        self.hub.put(key, data if isinstance(data, bytes) else stand_in(data))

    def _stat(self, key: str) -> store.ObjectInfo:
        self._access("look", self._machine.reads)
        self._found(key)
        return self.hub.objects[key][1]

    def _list(self, prefix: str) -> Iterator[store.ObjectInfo]:
        self._access("look", self._machine.reads)
        yield from (info for key, (_, info) in self.hub.objects.items() if key.startswith(prefix))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.hub.objects.pop(key, None)


def stand_in(path: Path) -> StandIn:
    """What the bucket keeps in the place of a file."""
    size = path.stat().st_size
    return StandIn.of(f"{path.name} {size}".encode(), size)
