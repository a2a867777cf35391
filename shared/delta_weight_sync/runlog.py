"""What happened in a run, as events in the bucket: the one source of every curve on the dashboard.

Buckets cannot append, so the log is a row of segments of at most `SEGMENT` events each. Only the newest
is rewritten; a reader keeps the full ones. The trainer box is the only writer: replicas hold a read-only
token, so it asks them for their status and records the answer.

Nothing signs the log, so a reader expects anything: numbers are finite, texts are cut, and a line that is no
event is skipped and counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import FORMAT, Digest
from delta_weight_sync.refs import Count, Line, Number, ProtocolError, Record, Text, Time, Word
from delta_weight_sync.store import Bucket

SEGMENT: Final = 512
SEGMENT_BYTES: Final = 4 << 20  # a segment ends before the event that would make it longer
LINE: Final = 1 << 20  # bytes of an event
METRICS: Final = 256  # of one step
_log = logging.getLogger("delta_weight_sync")


class SyncEvent(Record):
    """A version was published. Seconds are wall time on the trainer box."""

    kind: Literal["sync"] = "sync"
    t: Time
    version: Count
    sync: Count
    payload_bytes: Count  # the delta's, or the anchor's for version 0
    anchor_bytes: Count  # of an anchor published with it, else 0
    full_bytes: Count
    changed: Count
    total: Count
    diff_s: Number  # the trainer waited for this
    encode_s: Number
    publish_s: Number  # from hand-over to HEAD, in the background


class Rollout(Record):
    """One conversation of a group: per turn what the policy wrote and what the environment answered."""

    turns: tuple[tuple[Text, Text], ...]
    reward: Number | None
    sync: Count  # of the oldest weights that wrote a token of it


class StepEvent(Record):
    """One optimizer step, with what TRL logged about it, and now and then one group of its rollouts."""

    kind: Literal["step"] = "step"
    t: Time
    step: Count
    reward: Number | None
    metrics: Annotated[dict[Word, Number], Field(max_length=METRICS)]
    prompt: Text = ""  # of `rollouts`, which share it
    rollouts: tuple[Rollout, ...] = ()


class ReplicaEvent(Record):
    """What a replica said when it was asked; `version` None while it serves nothing."""

    kind: Literal["replica"] = "replica"
    t: Time
    replica: Word
    state: Line
    version: Count | None
    digest: Digest | None
    error: Line | None = None
    signed_by: Word | None = None  # whose signature of `version` was checked: a key's fingerprint


class CommitEvent(Record):
    """A replica took over a version. `lag_s` counts from the trainer's hand-over to the commit."""

    kind: Literal["commit"] = "commit"
    t: Time
    replica: Word
    version: Count
    digest: Digest
    lag_s: Number
    fetch_s: Number
    stage_s: Number
    pause_ms: Number  # how long generation stood still
    commit_ms: Number  # the part of it that wrote and checked weights
    joined: bool = False  # by comparing with a whole checkout, not by deltas


class ReplicaReport(Record):
    """What a replica answers at `/status?after=<version>`: itself, and its commits of newer versions."""

    format: Word = FORMAT
    status: ReplicaEvent
    commits: Annotated[tuple[CommitEvent, ...], Field(max_length=1024)]
    notice: Line = ""  # how it learns of new versions, in words


class CanaryEvent(Record):
    """How far a replica's logprobs of fixed prompts are from those of the version that it says it serves.

    `difference`: of any token's logprob, the largest, in nats; above `limit` it is an alarm.
    """

    kind: Literal["canary"] = "canary"
    t: float
    replica: str
    version: int
    difference: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    limit: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def alarm(self) -> bool:
        """Whether the replica computes with something else."""
        return self.difference > self.limit


class DoneEvent(Record):
    """Training ended; `digest` was computed from the trainer's live parameters, not from bookkeeping."""

    kind: Literal["done"] = "done"
    t: Time
    version: Count
    digest: Digest
    stopped_by: Literal["steps", "time"] = "steps"  # which limit ended it


Event = Annotated[
    SyncEvent | StepEvent | ReplicaEvent | CommitEvent | CanaryEvent | DoneEvent, Field(discriminator="kind")
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class RunLogWriter:
    """Appends events and writes them out in the background, at most once per `every_s` seconds."""

    def __init__(self, bucket: Bucket, run: str, *, every_s: float = 1.0) -> None:
        self._bucket, self._keys, self._every_s = bucket, Keys(run), every_s
        self._segment = self._first_free()
        self._lines: list[bytes] = []  # of the newest segment, and what comes after it
        self._written = 0
        self._lock, self._writing, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="run-log", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Record one event; returns at once. One of more than `LINE` bytes is left out, with a warning."""
        line = event.model_dump_json().encode()
        if len(line) > LINE:
            _log.warning("run log: an event of %d bytes is left out: shorten its texts", len(line))
            return
        with self._lock:
            self._lines.append(line)

    def close(self) -> None:
        """Write what is left; raises `BucketError` if that fails."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Write the newest segment, and move on to the next where it is full; one thread at a time does."""
        with self._writing:
            while full := self._write_segment():
                with self._lock:
                    del self._lines[:full]
                self._segment, self._written = self._segment + 1, 0

    def _first_free(self) -> int:
        """After a row without a gap: a reader would wait for what is missing."""
        there = {info.key for info in self._bucket.list(self._keys.log)}
        return next(number for number in itertools.count() if self._keys.segment(number) not in there)

    def _write_segment(self) -> int:
        """Write what is not written of the newest segment; how many events it has if it is full, else 0."""
        with self._lock:
            lines, more = self._lines[: (count := _fitting(self._lines))], len(self._lines) > count
        if count > self._written:
            self._bucket.put(self._keys.segment(self._segment), b"\n".join(lines))
            self._written = count
        return count if more or count == SEGMENT else 0

    def _loop(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.flush()
            except Exception as error:  # noqa: BLE001 - a lost log line must not stop training; the next flush retries
                _log.warning("run log: not written yet (%s)", error)


class RunLogReader:
    """Reads a run's events; call `poll` again to get the newer ones."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self._bucket, self._keys = bucket, Keys(run)
        self._segment, self._seen, self._etag = 0, 0, ""
        self.skipped = 0  # lines that were no events, so far; a segment that cannot be read counts as one

    def poll(self) -> Iterator[Event]:
        """The events that were added since the last call, oldest first, a segment in memory at a time.

        None are lost where that ends early, by an error of the bucket too.
        """
        while True:
            complete = self._bucket.stat(self._keys.segment(self._segment + 1)) is not None
            yield from self._read_segment()
            if not complete:
                return
            self._segment, self._seen, self._etag = self._segment + 1, 0, ""

    def _read_segment(self) -> Iterator[Event]:
        """What is new in the current segment."""
        info = self._bucket.stat(self._keys.segment(self._segment))
        if info is None or info.etag == self._etag:
            return
        for line in self._lines()[self._seen :]:
            self._seen += 1
            if event := _event(line):
                yield event
            elif line:
                self.skipped += 1
        self._etag = info.etag

    def _lines(self) -> list[bytes]:
        try:
            data = self._bucket.get(self._keys.segment(self._segment))
        except ProtocolError:  # far too large
            return [b"?"]
        return data.split(b"\n", SEGMENT)  # the last one holds what is too much


def _fitting(lines: list[bytes]) -> int:
    """How many lines one segment takes."""
    sizes = itertools.accumulate(len(line) + 1 for line in lines[:SEGMENT])
    return sum(size <= SEGMENT_BYTES for size in sizes)


def _event(line: bytes) -> Event | None:
    try:
        return _EVENT.validate_json(line) if len(line) <= LINE else None
    except ValidationError:
        return None
