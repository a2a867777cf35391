"""Invented events of a run's log, and manifests."""

from collections.abc import Iterable

import zstandard

from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Keys, LogKey, Manifest, Writer
from delta_weight_sync.runlog import CommitEvent, ReplicaEvent, SyncEvent, TrafficEvent
from delta_weight_sync.store import Bucket

DIGEST = "a" * 16
WRITER = Writer(1, "0" * 32)


def sync(
    version: int, payload: int, *, anchor: int = 0, changed: int = 10, t: float | None = None
) -> SyncEvent:
    at = 10.0 * version if t is None else t
    counts = {"payload_bytes": payload, "anchor_bytes": anchor, "full_bytes": 1000, "changed": changed}
    times = {"diff_s": 0.1, "encode_s": 0.2, "publish_s": 0.3}
    return SyncEvent(t=at, version=version, sync=version, total=500, **counts, **times)


def put_flush(
    bucket: Bucket, run: str, lines: Iterable[bytes], *, number: int = 0, writer: Writer = WRITER
) -> None:
    """One flush of a trainer's log."""
    key = Keys(run).log_part(LogKey(writer, number, number))
    bucket.put(key, zstandard.compress(b"\n".join(lines)))


def traffic(version: int, **sent: int) -> TrafficEvent:
    """All that a trainer sent up to `version`, by kind."""
    return TrafficEvent(
        t=10.0 * version, source="t1-00000000", since=0.0, trainer=True, version=version, sent=sent
    )


def commit(
    replica: str, version: int, *, lag_s: float = 1.0, pause_ms: float = 5.0, digest: str = DIGEST
) -> CommitEvent:
    times = {"lag_s": lag_s, "fetch_s": lag_s / 2, "stage_s": lag_s / 4}
    times |= {"pause_ms": pause_ms, "commit_ms": pause_ms / 2}
    return CommitEvent(t=10.0 * version + lag_s, replica=replica, version=version, digest=digest, **times)


def status(
    replica: str, version: int | None, *, state: str = "serving", error: str | None = None
) -> ReplicaEvent:
    digest = None if version is None else DIGEST
    return ReplicaEvent(t=0, replica=replica, state=state, version=version, digest=digest, error=error)


def manifest_of(version: int, anchor: int) -> Manifest:
    keys = Keys("r")
    content = {"size": 1, "sha256": "0" * 64}
    deltas = tuple(
        DeltaRef(key=keys.delta(v, WRITER), **content, base=v - 1, version=v, changed=1)
        for v in range(anchor + 1, version + 1)
    )
    weights = FileRef(key=keys.anchor(anchor, WRITER, "model.safetensors"), **content)
    files = {"anchor": AnchorRef(version=anchor, files=(weights,)), "deltas": deltas, "jumps": ()}
    files["parent"] = FileRef(key=keys.manifest(version - 1, WRITER), **content) if version else None
    counts = {"changed": 1, "total": 1, "full_bytes": 2}
    names = {"run": "r", "writer_term": 1, "writer": "0" * 32, "digest": "0" * 16}
    return Manifest(**names, version=version, sync=version, born=0.0, created_at=0, **files, **counts)
