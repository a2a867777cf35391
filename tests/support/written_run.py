"""A run in a bucket, written as a trainer writes it: run.json, manifests, HEAD and the log."""

import hashlib

import zstandard

from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Head, Keys, LogKey, Manifest, RunInfo
from delta_weight_sync.runlog import SEGMENT, CommitEvent, Event, RunLogWriter, StepEvent, SyncEvent
from delta_weight_sync.store import Bucket
from tests.support.records import WRITER, commit, status, sync, traffic

FULL = 440_000
TOTAL = 220_000
ANCHOR_EVERY = 50


def digest_of(version: int) -> str:
    return hashlib.sha256(b"%d" % version).hexdigest()[:16]


class WrittenRun:
    """Call `publish` for each version, then `commit` for each replica that takes it over."""

    def __init__(
        self,
        bucket: Bucket,
        run: str = "wordle",
        *,
        created_at: float = 1_780_000_000.0,
        log_every_s: float = 0.1,
    ) -> None:
        self.bucket = bucket
        self.keys = Keys(run)
        self.t = created_at
        self.created_at = created_at
        info = RunInfo(run=run, model="Qwen/Qwen3-0.6B", created_at=created_at, full_bytes=FULL)
        bucket.put(self.keys.info, info.to_bytes())
        self.log = RunLogWriter(bucket, run, WRITER, every_s=log_every_s)
        self.version = -1
        self._anchor = 0
        self._sent = {"anchors": 0, "deltas": 0}
        self._parent: FileRef | None = None

    def publish(self, payload: int, changed: int) -> None:
        """The next version, 20 seconds after the last one; version 0 is an anchor."""
        self.t += 20.0
        self.version += 1
        anchor = FULL if self.version and self.version % ANCHOR_EVERY == 0 else 0
        self._manifest(changed)
        self.log.append(self._sync(payload, changed, anchor))
        self._sent["anchors"] += anchor
        self._sent["deltas" if self.version else "anchors"] += payload
        self.log.append(traffic(self.version, **self._sent))

    def skip_to(self, version: int) -> SyncEvent:
        """Publish `version` without those before it, and without logging it."""
        self.version = version
        payload, changed = (40_000, 2_000) if version else (FULL, TOTAL)
        self._manifest(changed)
        return self._sync(payload, changed, 0)

    def _sync(self, payload: int, changed: int, anchor: int) -> SyncEvent:
        event = sync(self.version, payload, anchor=anchor, changed=changed, t=self.t)
        return event.model_copy(update={"full_bytes": FULL, "total": TOTAL})

    def commit(self, replica: str, version: int, **times: float) -> None:
        """`replica` takes over `version` right after the last event."""
        self.log.append(self.commit_event(replica, version, **times))

    def commit_event(self, replica: str, version: int, **times: float) -> CommitEvent:
        times = {"lag_s": 1.9, "pause_ms": 18.0} | times
        event = commit(replica, version, digest=digest_of(version), **times)
        return event.model_copy(update={"t": self.t + event.lag_s})

    def status(self, replica: str, version: int | None, **said: str) -> None:
        """What `replica` answers when it is asked."""
        digest = None if version is None else digest_of(version)
        event = status(replica, version, **said)
        self.log.append(event.model_copy(update={"t": self.t, "digest": digest}))

    def step(self, step: int, reward: float | None) -> None:
        self.log.append(StepEvent(t=self.t, step=step, reward=reward, metrics={}))

    def _manifest(self, changed: int) -> None:
        key = self.keys.manifest(self.version, WRITER)
        if self.version % ANCHOR_EVERY == 0:
            self._anchor = self.version
        deltas = tuple(self._delta(each, changed) for each in range(self._anchor + 1, self.version + 1))
        file = file_ref(self.keys.anchor(self._anchor, WRITER, "model.safetensors"), b"")
        common = {"run": self.keys.run, "born": 0.0, "version": self.version}
        common |= {"writer_term": WRITER.term, "writer": WRITER.id}
        facts = {"sync": self.version, "created_at": self.t, "digest": digest_of(self.version)}
        counts = {"changed": changed, "total": TOTAL, "full_bytes": FULL}
        files = {"anchor": AnchorRef(version=self._anchor, files=(file,)), "deltas": deltas, "jumps": ()}
        manifest = Manifest(**common, **facts, **counts, **files, parent=self._parent)
        data = manifest.to_bytes()
        self.bucket.put(key, data)
        self._parent = file_ref(key, data)
        self.bucket.put(self.keys.head(WRITER), Head(**common, manifest=self._parent).to_bytes())

    def _delta(self, version: int, changed: int) -> DeltaRef:
        ref = file_ref(self.keys.delta(version, WRITER), b"")
        return DeltaRef(**ref.model_dump(), base=version - 1, version=version, changed=changed)


def file_ref(key: str, data: bytes) -> FileRef:
    return FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def long(bucket: Bucket, versions: int, replicas: tuple[str, ...]) -> WrittenRun:
    """A run's log as a trainer leaves it, segment by segment, with manifests of its two ends only."""
    run = WrittenRun(bucket)
    run.log.close()
    first = run.skip_to(0)
    last = run.skip_to(versions)
    events: list[Event] = [first]
    for v in range(1, versions + 1):
        run.t = run.created_at + 20.0 * v
        events.append(StepEvent(t=run.t, step=v, reward=v / versions, metrics={"sample/staleness_mean": 1.0}))
        events.append(last.model_copy(update={"version": v, "sync": v, "t": run.t}))
        events += [run.commit_event(replica, v) for replica in replicas]
    lines = [event.model_dump_json().encode() for event in events]
    flushes = [b"\n".join(lines[at : at + 5]) for at in range(0, len(lines), 5)]  # one of each version
    for first in range(0, len(flushes), SEGMENT):
        some = flushes[first : first + SEGMENT]
        key = run.keys.log_part(LogKey(WRITER, first, first + len(some) - 1))
        bucket.put(key, zstandard.compress(b"\n\n".join(some)))
    return run
