"""What happened in a run, as events in the bucket: the one source of every curve on the dashboard.

Buckets cannot append, so the log is a row of segments of at most `SEGMENT` events each. Only the newest
is rewritten; a reader keeps the full ones. The trainer box is the only writer: replicas hold a read-only
token, so it asks them for their status and records the answer.
"""

from __future__ import annotations

import logging
import threading
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import FORMAT, Digest
from delta_weight_sync.refs import ProtocolError, Record
from delta_weight_sync.store import Bucket

SEGMENT = 512
_log = logging.getLogger("delta_weight_sync")


class SyncEvent(Record):
    """A version was published. Seconds are wall time on the trainer box."""

    kind: Literal["sync"] = "sync"
    t: float
    version: int
    sync: int
    payload_bytes: int  # the delta's, or the anchor's for version 0
    anchor_bytes: int  # of an anchor published with it, else 0
    full_bytes: int
    changed: int
    total: int
    diff_s: float  # the trainer waited for this
    encode_s: float
    publish_s: float  # from hand-over to HEAD, in the background


class Rollout(Record):
    """One conversation of a group: per turn what the policy wrote and what the environment answered."""

    turns: tuple[tuple[str, str], ...]
    reward: float | None
    sync: int  # of the oldest weights that wrote a token of it


class StepEvent(Record):
    """One optimizer step, with what TRL logged about it, and now and then one group of its rollouts."""

    kind: Literal["step"] = "step"
    t: float
    step: int
    reward: float | None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    prompt: str = ""  # of `rollouts`, which share it
    rollouts: tuple[Rollout, ...] = ()


class ReplicaEvent(Record):
    """What a replica said when it was asked; `version` None while it serves nothing."""

    kind: Literal["replica"] = "replica"
    t: float
    replica: str
    state: str
    version: int | None
    digest: Digest | None
    error: str | None = None
    signed_by: str | None = None  # whose signature of `version` was checked: a key's fingerprint


class CommitEvent(Record):
    """A replica took over a version. `lag_s` counts from the trainer's hand-over to the commit."""

    kind: Literal["commit"] = "commit"
    t: float
    replica: str
    version: int
    digest: Digest
    lag_s: float
    fetch_s: float
    stage_s: float
    pause_ms: float  # how long generation stood still
    commit_ms: float  # the part of it that wrote and checked weights
    joined: bool = False  # by comparing with a whole checkout, not by deltas


class ReplicaReport(Record):
    """What a replica answers at `/status?after=<version>`: itself, and its commits of newer versions."""

    format: str = FORMAT
    status: ReplicaEvent
    commits: tuple[CommitEvent, ...]
    notice: str = ""  # how it learns of new versions, in words


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
    t: float
    version: int
    digest: Digest


Event = Annotated[
    SyncEvent | StepEvent | ReplicaEvent | CommitEvent | CanaryEvent | DoneEvent, Field(discriminator="kind")
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class RunLogWriter:
    """Appends events and writes them out in the background, at most once per `every_s` seconds."""

    def __init__(self, bucket: Bucket, run: str, *, every_s: float = 1.0) -> None:
        self._bucket, self._keys, self._every_s = bucket, Keys(run), every_s
        self._segment = len(bucket.list(self._keys.log))
        self._events: list[Event] = []
        self._written = 0
        self._lock, self._writing, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="run-log", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Record one event; returns at once."""
        with self._lock:
            self._events.append(event)

    def close(self) -> None:
        """Write what is left; raises `BucketError` if that fails."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Write the newest segment, and move on to the next where it is full; one thread at a time does."""
        with self._writing:
            while self._write_segment():
                with self._lock:
                    del self._events[:SEGMENT]
                self._segment, self._written = self._segment + 1, 0

    def _write_segment(self) -> bool:
        """Write what is not written of the newest segment; True if that is full."""
        with self._lock:
            batch = self._events[:SEGMENT]
        if len(batch) > self._written:
            lines = b"\n".join(event.model_dump_json().encode() for event in batch)
            self._bucket.put(self._keys.segment(self._segment), lines)
            self._written = len(batch)
        return len(batch) == SEGMENT

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
        self._ready: list[Event] = []  # read already, though a later segment could not be

    def poll(self) -> list[Event]:
        """The events that were added since the last call, oldest first; after an error none are lost."""
        while self._read_segment():
            self._segment, self._seen, self._etag = self._segment + 1, 0, ""
        events, self._ready = self._ready, []
        return events

    def _read_segment(self) -> bool:
        """Take in what is new in the current segment; True if it is complete."""
        complete = self._bucket.stat(self._keys.segment(self._segment + 1)) is not None
        key = self._keys.segment(self._segment)
        info = self._bucket.stat(key)
        if info is not None and info.etag != self._etag:
            events = _parse(self._bucket.get(key), key)
            self._ready += events[self._seen :]
            self._seen, self._etag = len(events), info.etag
        return complete


def _parse(data: bytes, key: str) -> list[Event]:
    try:
        return [_EVENT.validate_json(line) for line in data.splitlines() if line]
    except ValidationError as error:
        raise ProtocolError(f"{key} is not a run log: {error.errors()[0]['msg']}") from None
