"""The event log of a run, in its bucket: the only source of the curves on the dashboard.

Each trainer writes a log of its own, as a series of flushes. A flush is one object, compressed, and never
changes. It usually travels in the upload that a version makes anyway (`RunLogWriter.riding`). When `SEGMENT`
flushes have come together, the writer stores them again as one object, a segment, and deletes them, so a
reader of a long run makes few requests. Replicas write nothing, because they have read-only tokens. So the
trainer asks replicas for their status and records the answers. A program that evaluates versions writes a log
of its own, too, with the term 0, which no trainer has.

The log is not signed, so readers do not trust it. Every field of an event has a limit. Readers shorten a text
or list that is too long; they skip and count a line that breaks another limit or is no event.
"""

import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import zstandard
from pydantic import Field, TypeAdapter, ValidationError

from delta_weight_sync.errors import BucketError, ObjectMissingError, ProtocolError
from delta_weight_sync.records import (
    FORMAT,
    LARGEST,
    LOG_FLUSHES,
    Count,
    Digest,
    Keys,
    Line,
    LogKey,
    Manifest,
    Number,
    Record,
    Text,
    Time,
    Word,
    Writer,
    cut,
    log_key,
)
from delta_weight_sync.store import SMALL, Bucket, Objects
from delta_weight_sync.store.ledger import Kind, Traffic
from delta_weight_sync.util import Guard, SafeLogger

SEGMENT: Final = 128  # flushes of a segment
SEGMENT_BYTES: Final = 4 << 20  # bytes of a flush or segment before compression, unless one event has more
LINE: Final = 1 << 20  # max bytes of an event
METRICS: Final = 256  # max metrics of a step
# A version pays for a tenth of its delta's bytes of log, but at least for these.
LOG_SHARE: Final = 10
VERSION_BYTES: Final = 2048
_SAVED: Final = 32  # unused bytes are saved up, but at most those of this many versions
_TWICE: Final = 2  # each flush is written again in its segment, which usually takes fewer bytes
_FLUSH_END: Final = b"\n\n"  # between the flushes of a segment
_WAITING: Final = 16 << 20  # max bytes of events that wait until the store takes them
_LINES: Final = 1 << 16  # max events in an object: even the shortest ones fill `SEGMENT_BYTES` with fewer
_LOOK_BACK: Final = 16  # objects of the log that a new trainer reads to find the newest version's event
_log = SafeLogger(__name__)


ByKind = dict[Word, Count]


class SyncEvent(Record):
    """A version was published. Seconds are wall time on the trainer's machine."""

    kind: Literal["sync"] = "sync"
    t: Time
    version: Count
    sync: Count
    payload_bytes: Count  # bytes of the delta; without a delta, of the anchor (a whole checkpoint)
    anchor_bytes: Count  # bytes of the anchor if the manifest names a new one, else 0
    full_bytes: Count
    changed: Count
    total: Count
    # The times are 0 if the trainer ended before it could log the version: its successor does not know them.
    diff_s: Number = 0.0  # how long the trainer waited until the changes of `sync` were found
    encode_s: Number = 0.0
    publish_s: Number = 0.0  # from the hand-over of the weights until HEAD is stored

    @property
    def whole(self) -> bool:
        """Whether the version was published as an anchor, without a delta."""
        return self.version == 0 or self.payload_bytes == self.anchor_bytes


class TrafficEvent(Record):
    """What a program has sent, received and requested since it started, by kind (`store.ledger.KINDS`)."""

    kind: Literal["traffic"] = "traffic"
    t: Time
    source: Word  # the trainer's `Writer`, such as "t1-3fa9c2d1", or the replica's name
    since: Time  # when the program began to count
    trainer: bool = False
    version: Count | None = None  # the newest version when a trainer counted
    sent: ByKind = Field(default={}, max_length=16)
    received: ByKind = Field(default={}, max_length=16)
    requests: ByKind = Field(default={}, max_length=16)


class Rollout(Record):
    """One conversation of a group. A turn is a text of the policy and the environment's answer."""

    turns: Annotated[tuple[tuple[Text, Text], ...], *cut(16)]
    reward: Number | None
    sync: Count  # the sync of the oldest weights that generated a token of the conversation


class StepEvent(Record):
    """A step with TRL's metrics and, now and then, a group of rollouts. Step 0 is before training."""

    kind: Literal["step"] = "step"
    t: Time
    step: Count
    reward: Number | None
    metrics: Annotated[dict[Word, Number], Field(max_length=METRICS)]
    prompt: Text = ""  # shared by all `rollouts`
    rollouts: Annotated[tuple[Rollout, ...], *cut(16)] = ()


class Quantization(Record):
    """What vLLM made of the served weights by quantizing them while it loaded."""

    scheme: Word  # vLLM's --quantization
    # Of the quantized tensors: equal on replicas with the same scheme, release of vLLM and kind of device.
    digest: Digest
    changed: Count  # how many bytes of these tensors the last commit changed


class ReplicaEvent(Record):
    """The status of a replica. `version` is None while it serves nothing."""

    kind: Literal["replica"] = "replica"
    t: Time
    replica: Word
    state: Line
    version: Count | None
    digest: Digest | None
    error: Line | None = None
    signed_by: Word | None = None  # fingerprint of the key that signed `version`, if signatures are checked
    quantized: Quantization | None = None  # None if vLLM does not quantize


class CommitEvent(Record):
    """A replica committed a version, and reported it at `t`.

    `lag_s` is the time from the trainer's hand-over (on the trainer's clock) until vLLM's last worker had the
    new weights (on that worker's clock). A negative time, from clocks that disagree, becomes 0.
    """

    kind: Literal["commit"] = "commit"
    t: Time
    replica: Word
    version: Count
    digest: Digest
    lag_s: Number
    fetch_s: Number
    stage_s: Number  # to decode the delta and prepare the commit
    pause_ms: Number  # how long generation paused
    commit_ms: Number  # the part of the pause in which weights were written and checked
    joined: bool = False  # whether the replica joined, that is, took this version from a checkpoint


class Drafts(Record):
    """How vLLM decodes speculatively. `accepted / drafted` is its acceptance rate."""

    method: Word  # vLLM's name: "ngram", "draft_model", "mtp", ...
    kept: Line = ""  # why the draft keeps the weights that it started with; "" if it follows or has none
    drafted: Count | None = None  # tokens that were proposed since vLLM started; None if vLLM does not count
    accepted: Count | None = None  # of these, the tokens that vLLM used


class ReplicaReport(Record):
    """A replica's answer to `/status?after=<version>`: its status, and its commits of newer versions."""

    format: Word = FORMAT
    status: ReplicaEvent
    commits: Annotated[tuple[CommitEvent, ...], Field(max_length=1024)]
    notice: Line = ""  # how the replica learns of new versions
    engine: Line = ""  # the replica's release of vLLM, and how it commits
    traffic: TrafficEvent | None = None
    logprobs_mode: Word = ""  # vLLM's option of this name; "" before vLLM runs, and from an older release
    # vLLM's values for sampling parameters that a request leaves out, if they are not the neutral ones.
    sampling_defaults: dict[Word, Number] = Field(default={}, max_length=16)
    drafts: Drafts | None = None  # None if vLLM does not decode speculatively

    def renamed(self, url: str) -> "ReplicaReport":
        """The report if another replica has this one's name, as all of one machine have by default: its URL
        is added to the name."""
        own = {"replica": f"{self.status.replica} ({url})"}
        commits = tuple(commit.model_copy(update=own) for commit in self.commits)
        return self.model_copy(update={"status": self.status.model_copy(update=own), "commits": commits})


class ScoreEvent(Record):
    """A version was evaluated. `name` says by what, `digest` which weights were evaluated."""

    kind: Literal["score"] = "score"
    t: Time
    version: Count
    digest: Digest
    name: Word
    scores: Annotated[dict[Word, Number], Field(max_length=METRICS)]
    seconds: Number  # how long the evaluation took


class DoneEvent(Record):
    """Training ended. `digest` is computed from the trainer's live parameters."""

    kind: Literal["done"] = "done"
    t: Time
    version: Count
    digest: Digest
    stopped_by: Literal["steps", "time"] = "steps"  # the limit that ended training


Event = Annotated[
    SyncEvent | TrafficEvent | StepEvent | ReplicaEvent | CommitEvent | ScoreEvent | DoneEvent,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class RunLogWriter:
    """Appends events, and uploads them with the next version or, if none comes, from time to time.

    The log has a budget of bytes: a tenth of what the deltas take, but at least `VERSION_BYTES` a version. If
    that is used up, steps are logged without their rollouts, or with fewer of them, and spare events are left
    out. Nothing else is left out.

    Args:
        bucket: The bucket that holds the run.
        run: Name of the run.
        writer: The trainer. No other trainer uses these keys.
        every_s: Least seconds between two uploads without a version; by default, the store's.
    """

    def __init__(self, bucket: Bucket, run: str, writer: Writer, *, every_s: float | None = None) -> None:
        self._bucket = bucket
        self._keys = Keys(run)
        self._writer = writer
        self._every_s = bucket.report_every_s if every_s is None else every_s
        self._guard = Guard("the run's log")
        self._lines: list[bytes] = []  # events of no flush yet
        self._waiting = 0  # bytes of `_lines`
        self._adding = threading.Lock()  # held while these two change
        # The flush that is not in the bucket yet: its key, its content.
        self._in_flight: tuple[str, bytes] | None = None
        self._flushed = b""  # the lines of that flush
        self._next = 0  # number of the next flush
        self._loose: list[bytes] = []  # the flushes of no segment yet, before compression
        self._reserved = 0  # bytes of the budget that are reserved for the segments of these flushes
        self._rides = True  # whether the last flush could be stored
        self._allowance = 8.0 * VERSION_BYTES  # bytes of log that may be written
        self._spent = 0  # bytes of them that spare events, which wait, have taken
        self._uploading = threading.Lock()
        self._closed = threading.Event()
        self._flushed_at = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="run-log", daemon=True)
        self._thread.start()

    def append(self, event: Event, *, spare: bool = False) -> None:
        """Record one event without waiting. Never raises: a fault is logged, and the event is left out.

        `spare`: leave the event out if the budget is used up.
        """
        with self._guard:
            if isinstance(event, SyncEvent):
                paid = max(event.payload_bytes / LOG_SHARE, VERSION_BYTES)
                self._allowance = min(self._allowance + paid, _SAVED * paid)
            if isinstance(event, StepEvent) and event.rollouts:
                event = self._affordable(event) if self._rides else _without_rollouts(event)
            line = _line(event)
            if len(line) > LINE and isinstance(event, StepEvent):
                line = _line(_without_rollouts(event))
            if spare:
                cost = len(_compressed(line)) * _TWICE
                if self._spent + cost > self._allowance:
                    return
                self._spent += cost
            if len(line) > LINE:
                raise ValueError(f"an event has {len(line)} bytes, and at most {LINE} are allowed")
            with self._adding:
                self._lines.append(line)
                self._waiting += len(line)
                if self._waiting > _WAITING:  # the store has not taken the log for hours
                    self._drop_oldest()

    def complete(self, newest: Manifest) -> None:
        """Log the newest version if its trainer was stopped before it logged this version."""
        with self._guard:
            if not _has_version(self._bucket, self._keys, newest.version):
                self.append(sync_event(newest, new_anchor=not newest.delta))

    @contextmanager
    def riding(self) -> Iterator[Objects]:
        """Yield the objects to store now. They count as stored if the block succeeds.

        They are few and small. Nothing is yielded while another thread stores them, and after the store
        refused them, until they could be stored alone: the log must not keep a version from its bucket.
        """
        if not self._rides or not self._uploading.acquire(blocking=False):
            yield ()
            return
        try:
            with self._guard:
                self._seal()
            yield (self._in_flight,) if self._in_flight else ()
            self._stored()
        except BucketError:
            self._rides = False
            raise
        finally:
            self._uploading.release()

    def close(self) -> None:
        """Write the remaining events. If the store does not take them, say so and give up."""
        self._closed.set()
        self._thread.join()
        with self._guard:
            self.flush()
            with self._uploading:
                self._compact(SEGMENT // 8)

    def flush(self) -> None:
        """Store all events of now. Raises `BucketError` if that fails."""
        with self._uploading:
            while True:
                self._seal()
                if self._in_flight is None:
                    break
                self._bucket.put(*self._in_flight)
                self._stored()
        self._rides = True

    def _drop_oldest(self) -> None:
        count = 0
        while self._waiting > _WAITING // 2:
            self._waiting -= len(self._lines[count])
            count += 1
        del self._lines[:count]
        _log.warning("run log: dropped the oldest %d events that wait", count)

    def _affordable(self, event: StepEvent) -> StepEvent:
        """The event with its rollouts if the budget allows that. If they are so large that they would never
        fit, with as many of them as fit."""
        cost = len(_compressed(_line(event))) * _TWICE
        if cost <= self._allowance:
            return event
        most = _SAVED * VERSION_BYTES // 2
        kept = int(len(event.rollouts) * self._allowance / cost) if cost > most else 0
        if kept <= 0:
            return _without_rollouts(event)
        return event.model_copy(update={"rollouts": event.rollouts[:kept]})

    def _seal(self) -> None:
        """Make a flush of the waiting events, if there are any and the flush before it is stored."""
        if self._in_flight is not None or not self._lines:
            return
        with self._adding:
            count = _fitting(self._lines)
            content = b"\n".join(self._lines[:count])
            data = _compressed(content)
            self._waiting -= sum(map(len, self._lines[:count]))
            del self._lines[:count]
            self._spent = 0
        self._allowance -= len(data) * _TWICE
        self._reserved += len(data)
        self._in_flight = self._keys.log_part(LogKey(self._writer, self._next, self._next)), data
        self._flushed = content

    def _stored(self) -> None:
        if self._in_flight is not None:
            self._loose.append(self._flushed)
            del self._loose[:-LOG_FLUSHES]  # if the store refuses segments, old flushes stay as they are
            self._in_flight = None
            self._next += 1
            self._flushed_at = time.monotonic()

    def _compact(self, least: int = SEGMENT) -> None:
        """Store `least` or more loose flushes as segments, usually as one, and delete them. Readers accept
        both at the same time."""
        loose = self._loose[:]
        if len(loose) < least and sum(map(len, loose)) < SEGMENT_BYTES:
            return
        first = self._next - len(loose)
        while loose:
            count = _fitting(loose)
            if count > 1:
                part = LogKey(self._writer, first, first + count - 1)
                segment = _compressed(_FLUSH_END.join(loose[:count]))
                self._bucket.put(self._keys.log_part(part), segment)
                self._reserved -= len(segment)
            del loose[:count]
            # Before the flushes are deleted: if the store refuses that, do not store the segment again.
            del self._loose[:count]
            if count > 1:
                numbers = range(first, first + count)
                self._bucket.delete([self._keys.log_part(LogKey(self._writer, n, n)) for n in numbers])
            first += count
        self._allowance += self._reserved
        self._reserved = 0

    def _loop(self) -> None:
        while not self._closed.wait(self._every_s):
            with self._guard:
                if not self._rides or time.monotonic() - self._flushed_at >= self._every_s:
                    self.flush()
                with self._uploading:
                    self._compact()


class RunLogReader:
    """Reads the events of a run. Call `poll` again to get newer ones.

    `list_every_s`: Least seconds between two listings of the log. In between, a call asks only for the next
    flush of the newest trainer, which is cheaper on the Hub, but misses flushes that became a segment.
    """

    def __init__(self, bucket: Bucket, run: str, *, list_every_s: float = 0.0) -> None:
        self._bucket = bucket
        self._keys = Keys(run)
        self._list_every_s = list_every_s
        # For each trainer: the number of the flush to read next, and how many of its lines were read already.
        self._seen: dict[Writer, tuple[int, int]] = {}
        self._listed: float | None = None  # when the log was listed last
        # The newest versions. Two trainers may log the same one: see `RunLogWriter.complete`.
        self._versions: deque[tuple[int, int]] = deque(maxlen=64)
        self.skipped = 0  # number of lines that were not events; an object that cannot be read is one line

    def poll(self) -> Iterator[Event]:
        """Yield the events added since the last call, by trainer, oldest first, with one object in memory.

        If the iteration ends early, perhaps because the bucket fails, the next call continues where it ended.
        """
        if self._listed is not None and self._list_every_s:
            writer = max(self._seen, default=None)
            news = False
            while writer:
                number, _ = self._seen[writer]
                try:
                    yield from self._read(LogKey(writer, number, number))
                except ObjectMissingError:
                    break
                news = True
            if news or time.monotonic() - self._listed < self._list_every_s:
                return
        started = time.monotonic()
        # Of two objects that begin with the same flush, take the segment.
        parts = _parts(self._bucket, self._keys)
        for part in sorted(parts, key=lambda part: (part.writer, part.first, -part.last)):
            number, _ = self._seen.setdefault(part.writer, (0, 0))
            if part.last >= number:
                try:
                    yield from self._read(part)
                except ObjectMissingError:  # it has become a part of a segment: the next call lists again
                    return
        self._listed = started

    def _read(self, part: LogKey) -> Iterator[Event]:
        try:
            flushes = _unpacked(self._bucket.get(self._keys.log_part(part))).split(_FLUSH_END)
        except ProtocolError:  # far too large, or not compressed as it should be
            flushes = [b"?"]
        number, done = self._seen[part.writer]
        if part.first > number:  # flushes that are gone
            number = part.first
            done = 0
        named = part.last - part.first + 1
        for at, flush in enumerate(flushes[number - part.first : named], number):
            for line in flush.split(b"\n")[done:]:
                done += 1
                self._seen[part.writer] = at, done
                try:
                    event = _EVENT.validate_json(line if len(line) <= LINE else b"")
                except ValidationError:
                    self.skipped += bool(line)
                    continue
                if isinstance(event, SyncEvent):
                    if (event.version, event.sync) in self._versions:
                        continue
                    self._versions.append((event.version, event.sync))
                yield event
            done = 0
            self._seen[part.writer] = at + 1, 0


def finite(value: Any) -> float | None:
    """The number as the log can hold it: a number, or a tensor or array of one, within `LARGEST`. None for
    everything else."""
    if not isinstance(value, int | float) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # of several elements
            return None
    within = isinstance(value, int | float) and -LARGEST <= value <= LARGEST
    return float(value) if within else None


def sync_event(
    manifest: Manifest,
    *,
    new_anchor: bool,
    diff_s: float = 0.0,
    encode_s: float = 0.0,
    publish_s: float = 0.0,
) -> SyncEvent:
    """The event of a published version. `new_anchor`: whether no earlier version named its anchor."""
    anchor_bytes = sum(file.size for file in manifest.anchor.weights) if new_anchor else 0
    return SyncEvent(
        **manifest.model_dump(include={"version", "sync", "full_bytes", "changed", "total"}),
        t=time.time(),
        payload_bytes=sum(part.size for part in manifest.delta) or anchor_bytes,
        anchor_bytes=anchor_bytes,
        diff_s=diff_s,
        encode_s=encode_s,
        publish_s=publish_s,
    )


def traffic_event(
    counts: Mapping[Kind, Traffic],
    source: str,
    since: float,
    *,
    trainer: bool = False,
    version: int | None = None,
) -> TrafficEvent:
    """The event of a program's traffic, with the fields of `TrafficEvent`; kinds without traffic left out."""
    return TrafficEvent(
        t=time.time(),
        source=source,
        since=since,
        trainer=trainer,
        version=version,
        sent={kind: each.sent for kind, each in counts.items() if each.sent},
        received={kind: each.received for kind, each in counts.items() if each.received},
        requests={kind: each.requests for kind, each in counts.items() if each.requests},
    )


def _has_version(bucket: Bucket, keys: Keys, version: int) -> bool:
    """Whether one of the newest objects of the log tells of `version`, or of a newer one."""
    for part in reversed(sorted(_parts(bucket, keys))[-_LOOK_BACK:]):
        try:
            content = _unpacked(bucket.get(keys.log_part(part)))
        except (ProtocolError, ObjectMissingError):
            continue
        for line in content.split(b"\n"):
            try:
                event = _EVENT.validate_json(line)
            except ValidationError:
                continue
            if isinstance(event, SyncEvent) and event.version >= version:
                return True
    return False


def _parts(bucket: Bucket, keys: Keys) -> list[LogKey]:
    """The objects of the log. Leaves out objects under keys that no trainer uses."""
    parsed = ((info.key, log_key(info.key)) for info in bucket.list(keys.log))
    return [part for key, part in parsed if part and keys.log_part(part) == key]


def _without_rollouts(event: StepEvent) -> StepEvent:
    """The step with its reward and metrics only."""
    return event.model_copy(update={"rollouts": (), "prompt": ""})


def _fitting(pieces: Sequence[bytes]) -> int:
    """How many of the first pieces fit into `SEGMENT_BYTES`, but at least one."""
    sizes = itertools.accumulate(len(piece) + len(_FLUSH_END) for piece in pieces)
    return max(1, sum(size <= SEGMENT_BYTES for size in sizes))


def _line(event: Event) -> bytes:
    """An event as JSON. Numbers have six digits and times milliseconds: more would be most of the log."""
    fields = _short(event.model_dump(mode="json"))
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _short(value: Any, name: str = "") -> Any:
    if isinstance(value, float):
        # Times are rounded down, so that no event seems to be later than what came after it.
        return math.floor(1000 * value) / 1000 if name in ("t", "since") else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(each, key) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=12).compress(content)


def _unpacked(data: bytes) -> bytes:
    """The content of an object of the log. Raises `ProtocolError` if it is damaged or far too large."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= SMALL:  # negative: not stated
            raise ProtocolError(f"an object of the log does not say that it has at most {SMALL} bytes")
        content = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"an object of the log is damaged: {error}") from error
    if content.count(b"\n") > _LINES:
        raise ProtocolError(f"an object of the log has more than {_LINES} lines")
    return bytes(content)
