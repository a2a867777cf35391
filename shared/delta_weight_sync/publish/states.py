"""Saves trainer states to the bucket, finds them again, and restores them bit for bit.

A state holds what a trainer needs to resume from one version. It has one object per rank and a record. The
record is written last, when the version and all objects are in the bucket:

    runs/<run>/state/00000040.00000041.t1-3fa9c2d1.json                 for version 40, after sync 41
    runs/<run>/state/00000040.00000041.t1-3fa9c2d1/rank-0.safetensors   what rank 0 saves for that version

Two states stay in the bucket: the newest, and the one before it in case an object of the newest is damaged.
Each object lists its blocks of tensors, and a rank that resumes knows all lists. So any number of ranks can
resume: each rank reads the blocks that overlap its own. The trainer's thread copies a state to host memory; a
background thread uploads the copy.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final

import torch
from pydantic import ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from delta_weight_sync.errors import ObjectMissingError, ProtocolError, StateError
from delta_weight_sync.publish import state_contents
from delta_weight_sync.publish.outbox import Outbox, RepeatedSyncs
from delta_weight_sync.publish.sharding import Peers, held_block, local
from delta_weight_sync.publish.state_contents import KEPT, Others, StateHeader, Tensors, as_json
from delta_weight_sync.publish.writer import RunWriter, put_file
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Count, Digest, FileRef, Sealed, Time
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.store import SMALL
from delta_weight_sync.util import SafeLogger

EXTRA_BYTES: Final = SMALL - (1 << 20)  # of `extra` as JSON; the rest of the record is for thousands of ranks
_DAMAGED = (ProtocolError, ObjectMissingError, SafetensorError)
_log = SafeLogger()
Snapshot = tuple[Tensors, StateHeader]
Version = tuple[int, str]  # its sync and digest; the manifests of all versions could fill the memory


class StateRecord(Sealed):
    """One state: the version it belongs to, its objects, and the trainer's own `extra`."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    born: Time  # when the run began, as in its manifests
    version: Count
    digest: Digest  # of the version
    sync: Count  # the trainer's number of the sync
    created_at: Time  # unix seconds
    ranks: Annotated[tuple[FileRef, ...], Field(min_length=1)]
    extra: Annotated[dict[Any, Any], *KEPT]


def extra_as_json(extra: dict[str, Any]) -> Any:
    """A copy of `extra` for a record. Raises `StateError` if it cannot be saved, or could not be read."""
    copy = as_json(extra, "`extra`")
    if (size := len(json.dumps(copy, separators=(",", ":")))) > EXTRA_BYTES:
        raise StateError(
            f"`extra` has {size:,} bytes as JSON, and a state may have {EXTRA_BYTES:,}: hand over large"
            " values as tensors, among `weights`"
        )
    return copy


class StateSaver:
    """Uploads snapshots (states copied to the host) one at a time. All ranks save at the same time."""

    def __init__(
        self, reader: RunReader, peers: Peers, outbox: Outbox, writer: RunWriter | None, every_s: float
    ) -> None:
        """Only the main rank has a `writer`."""
        self._reader = reader
        self._peers = peers
        self._outbox = outbox
        self._writer = writer
        self._every_s = every_s  # least seconds between snapshots
        self._next = 0.0  # when the next one is due
        self.thread: threading.Thread | None = None  # makes the newest upload
        self.failure: Exception | None = None  # why the newest upload failed

    def ready(self, *, final: bool) -> bool:
        """Whether a snapshot may be saved now. The last upload must have ended. If `every_s` is not 0, and
        not `final`, that upload must have begun at least `every_s` seconds, and ten of its durations, ago."""
        return not (self.thread and self.thread.is_alive()) and (final or time.monotonic() >= self._next)

    def save(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        """Upload the snapshot in the background, once its version is in the bucket."""
        self.failure = None
        arguments = (snapshot, sync, extra)
        self.thread = threading.Thread(target=self._run, args=arguments, name="state", daemon=True)
        self.thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no snapshot is being uploaded. Raises `TimeoutError` after `timeout_s`, if given."""
        if self.thread:
            self.thread.join(timeout_s)
            if self.thread.is_alive():
                raise TimeoutError(f"the state is not in the bucket after {timeout_s:g} s: check the network")

    def _run(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            with self._peers.fail_together():
                self._save(snapshot, sync, extra)
        except Exception as error:  # noqa: BLE001 - training continues
            error.__cause__ = error.__context__ = None  # their frames would keep the snapshot in memory
            self.failure = error.with_traceback(None)
            _log.warning("the trainer's state was not saved: %s; earlier states are still valid", error)
        if self._every_s:
            took = time.monotonic() - started
            self._next = started + max(self._every_s, 10 * took)

    def _save(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        # The sync in the state's name is the main rank's: TRL counts syncs on that rank only.
        own = (self._outbox.pinned(), sync, self._writer.writer) if self._writer else None
        manifest, sync, writer = self._peers.exchange(own)[0]
        if manifest is None:  # the outbox was closed, or failed, before the version was in the bucket
            return
        tensors, header = snapshot
        name = self._reader.keys.state(manifest.version, sync, writer)
        with Scratch() as folder:
            save_file(tensors, path := folder / "state", {"header": header.model_dump_json()})
            stored = put_file(self._reader.bucket, path, f"{name}/rank-{self._peers.rank}.safetensors")
        ranks = self._peers.exchange(stored)
        if self._writer:
            same = manifest.model_dump(include={"run", "born", "version", "digest"})
            record = StateRecord(**same, sync=sync, created_at=time.time(), ranks=tuple(ranks), extra=extra)
            self._reader.bucket.put(f"{name}.json", self._writer.signed(record).to_bytes())
            _prune(self._reader, name)


def _prune(reader: RunReader, newest: str) -> None:
    """Keep the complete state `newest` and the state before it. Delete older states, their records first."""
    listing = [info.key for info in reader.bucket.list(reader.keys.states)]
    older = [key.removesuffix(".json") for key in listing if key.endswith(".json") and key < f"{newest}.json"]
    if older:
        gone = [key for key in listing if key < max(older)]
        reader.bucket.delete([key for key in gone if key.endswith(".json")])
        reader.bucket.delete([key for key in gone if not key.endswith(".json")])


class FoundState:
    """A state to restore. Each rank reads only the objects with blocks that the rank needs."""

    def __init__(self, reader: RunReader, record: StateRecord, peers: Peers, folder: Scratch) -> None:
        self.record = record
        self._reader = reader
        self._peers = peers
        self._folder = folder
        self._headers: dict[int, StateHeader] = {}  # of all saved ranks
        self._files: dict[int, Any] = {}  # the open objects, by saved rank

    def is_whole(self) -> bool:
        """Check every object, each on one rank. Return whether none is damaged, on every rank."""
        read: dict[int, StateHeader] | None = None
        with self._peers.fail_together():
            try:
                share = range(self._peers.rank, len(self.record.ranks), self._peers.size)
                read = {rank: self._read_header(rank) for rank in share}
            except _DAMAGED as error:
                _log.warning(
                    "skipped the state of version %d, damaged or of an earlier release: %s",
                    self.record.version,
                    error,
                )
        parts = self._peers.exchange(read)
        if None in parts:
            return False
        self._headers = {rank: header for part in parts for rank, header in part.items()}
        return True

    def restore(self, live: Tensors, optimizer: Optimizer, others: Others) -> None:
        """Restore the state, on every rank. Raises `StateError` if it does not fit this trainer."""
        with self._peers.fail_together(), torch.no_grad():
            own = self._peers.rank if self._peers.rank in self._headers else 0
            header = self._headers[own]
            saved = {entry: block for each in self._headers.values() for entry, block in each.held.items()}
            state_contents.load(header, saved, self._fill, live, optimizer, others)
            state_contents.load_random_state(header.random, self._peers.rank - own)

    def _fill(self, entry: str, tensor: torch.Tensor) -> None:
        """Fill this rank's block of a tensor from the saved blocks that overlap it."""
        own = local(tensor)
        block = held_block(tensor)
        missing = math.prod(block.extent)
        for rank, header in self._headers.items():
            held = header.held.get(entry)
            overlap = block.overlap(held.block) if held and missing else None
            if overlap:
                here, there = overlap
                own[here].copy_(self._file(rank).get_slice(entry)[there])
                missing -= own[here].numel()
        if missing:
            raise ProtocolError(f"the state of version {self.record.version} lacks a part of {entry}")

    def _read_header(self, rank: int) -> StateHeader:
        metadata = self._file(rank).metadata() or {}
        try:
            return StateHeader.model_validate_json(metadata["header"])
        except (KeyError, ValidationError) as error:
            raise ProtocolError(f"{self.record.ranks[rank].key} is not a trainer's state: {error}") from error

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._reader.fetch(self.record.ranks[rank], self._folder.path)
            self._files[rank] = safe_open(path, framework="pt")
        return self._files[rank]


def find_state(reader: RunReader, outbox: Outbox, peers: Peers, folder: Scratch) -> FoundState | None:
    """Find the newest state to resume from, and download it to `folder`.

    Sets `outbox.repeated` to the syncs that the earlier trainer published from that state on. If this trainer
    repeats these syncs exactly, the outbox does not publish them again. Without a state, returns None, or
    raises `StateError` if the run has versions after version 0. Every rank must call this function.
    """
    states = usable_states(reader) if peers.main else iter(())

    def following() -> Any:
        with peers.fail_together():
            state = next(states, None)  # reads no manifest before the state's version
        return peers.exchange(state)[0]

    for record, later in iter(following, None):
        found = FoundState(reader, record, peers, folder)
        if found.is_whole():
            outbox.repeated = RepeatedSyncs(_repeated(record, later))
            return found
    with peers.fail_together():
        newest = reader.newest() if peers.main else None
        if newest and newest.version > 0:
            raise StateError(
                f"run {reader.keys.run!r} has versions up to {newest.version}, but no state to resume from:"
                " to start again from the base, call no `restore` and set fresh=True (`trainer.train` has"
                " --fresh), or choose another run name"
            )
    if newest := peers.exchange(newest)[0]:  # version 0: the first sync repeats it if the base is the same
        outbox.repeated = RepeatedSyncs({newest.sync: newest.digest})
    return None


def usable_states(reader: RunReader) -> Iterator[tuple[StateRecord, list[Version]]]:
    """Yield the complete states of the run, newest first, each with the versions after it, newest first."""
    listing = {info.key: info.size for info in reader.bucket.list(reader.keys.states)}
    records: list[StateRecord] = []
    for key in sorted((key for key in listing if key.endswith(".json")), reverse=True):
        try:
            records.append(reader.read(StateRecord, key))
        except (ProtocolError, ObjectMissingError) as error:
            _log.warning("skipped a trainer state, damaged or of an earlier release: %s", error)
    oldest = min((record.version for record in records), default=None)
    later: list[Version] = []
    for manifest in reader.versions():
        if oldest is None or manifest.version < oldest:
            return
        for record in records:
            whole = all(listing.get(ref.key) == ref.size for ref in record.ranks)
            same = (record.born, record.version, record.digest)
            if whole and same == (manifest.born, manifest.version, manifest.digest):
                yield record, later.copy()
        later.append((manifest.sync, manifest.digest))


def _repeated(record: StateRecord, later: list[Version]) -> dict[int, str]:
    """Return sync -> digest of the syncs that a trainer makes again if it repeats exactly from `record` on.

    `later`: the versions after `record`, newest first. A version is left out if a newer version has the same
    or a lower sync number: a trainer then went back to a state before the version, and did not repeat it. For
    example, if `later` has the syncs 8, 6, 7, 6 (newest first), the 7 and the older 6 are left out."""
    line: list[Version] = []
    for sync, digest in later:
        if not line or sync < line[-1][0]:
            line.append((sync, digest))
    return {record.sync: record.digest} | {sync: digest for sync, digest in line if sync > record.sync}
