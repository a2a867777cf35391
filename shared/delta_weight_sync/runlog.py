"""The event log of a run, in its bucket: the only source of the curves on the dashboard.

The log is a series of segments with at most `SEGMENT` events each. Buckets cannot append, so each write of
new events uploads the whole newest segment again, with all events that it held before. Full segments never
change, so a reader reads each full segment once. Only the trainer writes, because replicas have read-only
tokens. So the trainer asks replicas for their status and records the answers.

The log is not signed, so readers do not trust it. Every field of an event has a limit. Readers shorten a text
or list that is too long; they skip and count a line that breaks another limit or is no event.
"""

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import FORMAT, Count, Digest, Keys, Line, Number, Record, Text, Time, Word, cut
from delta_weight_sync.store import Bucket

SEGMENT: Final = 512  # max events of a segment
SEGMENT_BYTES: Final = 4 << 20  # max bytes of a segment
LINE: Final = 1 << 20  # max bytes of an event
METRICS: Final = 256  # max metrics of a step
_log = logging.getLogger(__name__)


class SyncEvent(Record):
    """A version was published. Seconds are wall time on the trainer's machine."""

    kind: Literal["sync"] = "sync"
    t: Time
    version: Count
    sync: Count
    payload_bytes: Count  # bytes of the delta; without a delta, of the anchor (a whole checkpoint)
    anchor_bytes: Count  # bytes of the anchor if the manifest names a new one, else 0
    sent_bytes: Count = 0  # bytes of all uploads since the last version, also of states and of this log
    full_bytes: Count
    changed: Count
    total: Count
    diff_s: Number  # how long the trainer waited until the changes of `sync` were found
    encode_s: Number
    publish_s: Number  # from the hand-over of the weights until HEAD is stored; training goes on meanwhile

    @property
    def whole(self) -> bool:
        """Whether the version was published as an anchor, without a delta."""
        return self.version == 0 or self.payload_bytes == self.anchor_bytes


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


class ReplicaReport(Record):
    """A replica's answer to `/status?after=<version>`: its status, and its commits of newer versions."""

    format: Word = FORMAT
    status: ReplicaEvent
    commits: Annotated[tuple[CommitEvent, ...], Field(max_length=1024)]
    notice: Line = ""  # how the replica learns of new versions
    engine: Line = ""  # the replica's release of vLLM, and how it commits


class DoneEvent(Record):
    """Training ended. `digest` is computed from the trainer's live parameters."""

    kind: Literal["done"] = "done"
    t: Time
    version: Count
    digest: Digest
    stopped_by: Literal["steps", "time"] = "steps"  # the limit that ended training


Event = Annotated[SyncEvent | StepEvent | ReplicaEvent | CommitEvent | DoneEvent, Field(discriminator="kind")]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class RunLogWriter:
    """Appends events, and uploads new ones in the background, at most once per `every_s` seconds."""

    def __init__(self, bucket: Bucket, run: str, *, every_s: float = 1.0) -> None:
        self._bucket, self._keys, self._every_s = bucket, Keys(run), every_s
        there = {info.key for info in bucket.list(self._keys.log)}
        # Use the lowest free number: if a number were missing, readers would wait for this segment forever.
        self._segment = next(n for n in itertools.count() if self._keys.segment(n) not in there)
        self._lines: list[bytes] = []  # lines that are not yet in a full segment; list operations are atomic
        self._written = 0  # lines of the newest segment that are in the bucket
        self._writing, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="run-log", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Record one event without waiting. An event of more than `LINE` bytes is dropped with a warning."""
        line = event.model_dump_json().encode()
        if len(line) > LINE:
            _log.warning("run log: dropped an event of %d bytes: shorten its texts", len(line))
        else:
            self._lines.append(line)

    def close(self) -> None:
        """Write the remaining events. Raises `BucketError` if that fails."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Write the newest segment. If that is full, write the next segment, too. Thread-safe."""
        with self._writing:
            while full := self._write_segment():
                del self._lines[:full]
                self._segment, self._written = self._segment + 1, 0

    def _write_segment(self) -> int:
        """Write new events to the newest segment. Returns its number of events if it is full, else 0."""
        known = self._lines[:]  # other threads append meanwhile
        sizes = itertools.accumulate(len(line) + 1 for line in known[:SEGMENT])
        count = sum(size <= SEGMENT_BYTES for size in sizes)  # events that fit into one segment
        if count > self._written:
            self._bucket.put(self._keys.segment(self._segment), b"\n".join(known[:count]))
            self._written = count
        return count if len(known) > count or count == SEGMENT else 0

    def _loop(self) -> None:
        failed = ""
        while not self._closed.wait(self._every_s):
            try:
                self.flush()
                failed = ""
            except Exception as error:  # noqa: BLE001 - the log must not stop training; the next flush retries
                if str(error) != failed:
                    _log.warning("run log: not written yet (%s)", error)
                failed = str(error)


class RunLogReader:
    """Reads the events of a run. Call `poll` again to get newer ones."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self._bucket, self._keys = bucket, Keys(run)
        self._segment, self._seen, self._etag = 0, 0, ""
        self.skipped = 0  # number of lines that were not events; a segment that is too large is one line

    def poll(self) -> Iterator[Event]:
        """Yield the events added since the last call, oldest first, with one segment in memory at a time.

        If the iteration ends early, perhaps because the bucket fails, the next call continues where it ended.
        """
        while True:
            # Ask before reading: once the next segment exists, this segment does not change any longer.
            complete = self._bucket.stat(self._keys.segment(self._segment + 1)) is not None
            yield from self._read_segment()
            if not complete:
                return
            self._segment, self._seen, self._etag = self._segment + 1, 0, ""

    def _read_segment(self) -> Iterator[Event]:
        info = self._bucket.stat(self._keys.segment(self._segment))
        if info is None or info.etag == self._etag:
            return
        try:
            data = self._bucket.get(self._keys.segment(self._segment))
        except ProtocolError:  # the segment is far too large
            data = b"?"
        # If there are more lines than a segment may have, the rest stays one piece, which is no event.
        for line in data.split(b"\n", SEGMENT)[self._seen :]:
            self._seen += 1
            try:
                yield _EVENT.validate_json(line if len(line) <= LINE else b"")
            except ValidationError:
                self.skipped += bool(line)
        self._etag = info.etag
