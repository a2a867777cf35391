"""The trainer's states in the bucket: one object per rank, and a small record that makes them one state.

    runs/<run>/state/00000040.00000041.t1-3fa9c2d1.json                 of version 40, after sync 41
    runs/<run>/state/00000040.00000041.t1-3fa9c2d1/rank-0.safetensors   what rank 0 knew besides

A state is whole once its record is there, which is written last, after its version. Two are kept: the newest,
and the one before it should an object of the newest be damaged.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer
from delta_weight_sync.protocol import Digest, Manifest, Sealed
from delta_weight_sync.publish.sharded import Peers
from delta_weight_sync.publish.snapshot import Snapshot
from delta_weight_sync.refs import Count, FileRef, ProtocolError, Time
from delta_weight_sync.store import ObjectMissing

_log = logging.getLogger("delta_weight_sync")


class StateRecord(Sealed):
    """One state: the version it belongs to, its objects, and what its trainer wrote down besides."""

    born: Time  # of the run, as in its manifests
    version: Count
    digest: Digest  # of that version
    sync: Count  # the trainer's own count of weight syncs
    created_at: Time  # unix seconds
    ranks: tuple[FileRef, ...]
    extra: dict[str, Any]


class StateKeeper:
    """Puts one snapshot at a time into the bucket, in the background; every rank has one, all go in step."""

    def __init__(
        self,
        reader: RunReader,
        peers: Peers,
        published: Callable[[], Manifest | None],
        signed: Callable[[StateRecord], StateRecord],
    ) -> None:
        """On the main rank `published` waits until the snapshot's version is in the bucket."""
        self._reader, self._peers, self._published, self._signed = reader, peers, published, signed
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def used(self) -> bool:
        """True once there was a snapshot."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """True while a snapshot is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def keep(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        """Put it into the bucket once its version is there."""
        self._failure, arguments = None, (snapshot, sync, extra)
        self._thread = threading.Thread(target=self._run, args=arguments, name="state", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until no snapshot is on its way; raises `TimeoutError`."""
        if self._thread:
            self._thread.join(timeout_s)
        if self.busy:
            raise TimeoutError(f"the state is not in the bucket after {timeout_s:.0f} s; is the link up?")

    def require(self, timeout_s: float) -> None:
        """Until the last snapshot is in the bucket; raises `TimeoutError`, or why it is not."""
        self.wait(timeout_s)
        if self._failure:
            raise self._failure

    def _run(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        try:
            with self._peers.together():
                self._keep(snapshot, sync, extra)
        except Exception as error:  # noqa: BLE001 - training goes on; who waits for it is told
            self._failure = error
            _log.warning("the trainer's state was not kept: %s; the one before it stands", error)

    def _keep(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        # The main rank's count of syncs names the state: TRL counts on that one alone.
        own = (self._published(), sync) if self._peers.main else None
        manifest, sync = self._peers.exchange(own)[0]
        if manifest is None:
            return
        name = self._reader.keys.state(manifest.version, sync, Writer(manifest.writer_term, manifest.writer))
        refs = self._peers.exchange(self._put(snapshot, f"{name}/rank-{self._peers.rank}.safetensors"))
        if self._peers.main:
            record = StateRecord(
                run=manifest.run,
                born=manifest.born,
                version=manifest.version,
                digest=manifest.digest,
                sync=sync,
                created_at=time.time(),
                ranks=tuple(refs),
                extra=extra,
            )
            self._reader.bucket.put(f"{name}.json", self._signed(record).to_bytes())
            prune(self._reader, name)

    def _put(self, snapshot: Snapshot, key: str) -> FileRef:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            sha256 = snapshot.write(path)
            self._reader.bucket.put(key, path)
            return FileRef(key=key, size=path.stat().st_size, sha256=sha256)


def usable(reader: RunReader) -> Iterator[tuple[StateRecord, list[Manifest]]]:
    """The states that belong to a version of HEAD's chain, newest first, each with the versions after it."""
    listing = {info.key: info.size for info in reader.bucket.list(reader.keys.states)}
    records = [record for key in sorted(listing, reverse=True) if (record := _record(reader, key))]
    oldest = min((record.version for record in records), default=None)
    later: list[Manifest] = []
    for manifest in reader.history():
        if oldest is None or manifest.version < oldest:
            return
        for record in records:
            whole = all(listing.get(ref.key) == ref.size for ref in record.ranks)
            if whole and _names(record) == _names(manifest):
                yield record, later.copy()
        later.append(manifest)


def repeated(record: StateRecord, later: list[Manifest]) -> dict[int, str]:
    """Digest by sync of what a trainer publishes that goes on from `record` and does the same again.

    `later` is newest first. A trainer that rose and did otherwise has left versions of before behind.
    """
    line: list[Manifest] = []
    for manifest in later:
        if not line or manifest.sync < line[-1].sync:
            line.append(manifest)
    return {record.sync: record.digest} | {m.sync: m.digest for m in line if m.sync > record.sync}


def prune(reader: RunReader, newest: str) -> None:
    """Delete all states before the one that precedes `newest`, the name of a state that is whole."""
    listing = [info.key for info in reader.bucket.list(reader.keys.states)]
    older = [key.removesuffix(".json") for key in listing if key.endswith(".json") and key < f"{newest}.json"]
    if older:
        gone = [key for key in listing if key < max(older)]
        records = [key for key in gone if key.endswith(".json")]
        reader.bucket.delete(records)
        reader.bucket.delete([key for key in gone if not key.endswith(".json")])


def _names(of: StateRecord | Manifest) -> tuple[float, int, str]:
    return of.born, of.version, of.digest


def _record(reader: RunReader, key: str) -> StateRecord | None:
    if not key.endswith(".json"):
        return None
    try:
        return reader.read(StateRecord, key)
    except (ProtocolError, ObjectMissing) as error:
        _log.warning("a trainer's state is passed over: %s", error)
        return None
