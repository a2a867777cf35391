"""Trainer states in the bucket: saves them, finds them again, and restores them bit for bit.

A state belongs to a version: it holds what the trainer needs to resume from that version. It has one object
per rank and a small record. The record is written last, when the version and all objects are in the bucket:

    runs/<run>/state/00000040.00000041.t1-3fa9c2d1.json                 for version 40, after sync 41
    runs/<run>/state/00000040.00000041.t1-3fa9c2d1/rank-0.safetensors   what rank 0 saves for that version

Two states stay in the bucket: the newest, and the one before it in case an object of the newest is damaged.
The version already holds the upper half of a published float32 parameter and the whole of a bfloat16 one. So
a state holds little more than the lower 16 bits of the former (see `optimizer`), nothing of the latter, and
all else in full. The trainer's thread copies a state to host memory; a background thread writes the copy.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from delta_weight_sync.codec import Bits
from delta_weight_sync.errors import CodecError, ObjectMissingError, ProtocolError, StateError
from delta_weight_sync.publish.outbox import Outbox, RepeatedSyncs
from delta_weight_sync.publish.sharding import Peers, Weights, held_block, is_block, local
from delta_weight_sync.publish.writer import RunWriter, put_file
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Count, Digest, FileRef, Manifest, Sealed, Time, Writer
from delta_weight_sync.resume import optimizer as parts
from delta_weight_sync.resume.optimizer import Tensors, as_json, to_host
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.util import time_text

_NOTE = {"weights", "optimizer", "random", "others"}
_LOW, _PUBLISHED, _WHOLE = "low", "published", "whole"  # how much of a weight is saved: half, none, all
_DTYPES = {_LOW: torch.float32, _PUBLISHED: torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
_DAMAGED = (ProtocolError, CodecError, ObjectMissingError, SafetensorError)
_log = logging.getLogger("delta_weight_sync")
Others = dict[str, Stateful]
RankBits = tuple[int, Bits | None]


class StateRecord(Sealed):
    """One state: the version it belongs to, its objects, and the trainer's own `extra`."""

    born: Time  # when the run began, as in its manifests
    version: Count
    digest: Digest  # of that version
    sync: Count  # the trainer's number of the sync
    created_at: Time  # unix seconds
    ranks: tuple[FileRef, ...]
    extra: dict[str, Any]


class StateSaver:
    """Uploads one snapshot at a time in the background. Every rank has a saver; all save at the same time."""

    def __init__(
        self, reader: RunReader, peers: Peers, outbox: Outbox, writer: RunWriter | None, every_s: float
    ) -> None:
        """Only the main rank has a `writer`."""
        self._reader, self._peers, self._outbox, self._writer = reader, peers, outbox, writer
        self._every_s, self._next = every_s, 0.0  # when the next snapshot is due
        self.thread: threading.Thread | None = None  # of the last upload
        self.failure: Exception | None = None  # why it failed

    def ready(self, *, final: bool) -> bool:
        """Whether a snapshot may be saved now. Unless `final` or `state_minutes` is 0, uploads take at
        most a tenth of the time."""
        return not (self.thread and self.thread.is_alive()) and (final or time.monotonic() >= self._next)

    def save(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        """Upload the snapshot in the background, once its version is in the bucket."""
        self.failure, arguments = None, (snapshot, sync, extra)
        self.thread = threading.Thread(target=self._run, args=arguments, name="state", daemon=True)
        self.thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until no snapshot is being uploaded. Raises `TimeoutError`."""
        if self.thread:
            self.thread.join(timeout_s)
            if self.thread.is_alive():
                raise TimeoutError(
                    f"the state is not in the bucket after {timeout_s:.0f} s: check the network"
                )

    def _run(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            with self._peers.fail_together():
                self._save(snapshot, sync, extra)
        except Exception as error:  # noqa: BLE001 - training continues
            self.failure = error
            _log.warning("the trainer's state was not saved: %s; the previous state is still valid", error)
        if self._every_s:
            took = time.monotonic() - started
            self._next = started + max(self._every_s, 10 * took)

    def _save(self, snapshot: Snapshot, sync: int, extra: dict[str, Any]) -> None:
        # The state is named by the main rank's number of the sync, because TRL counts only there.
        own = (self._outbox.pinned(), sync) if self._peers.main else None
        manifest, sync = self._peers.exchange(own)[0]
        if manifest is None:
            return
        name = self._reader.keys.state(manifest.version, sync, Writer(manifest.writer_term, manifest.writer))
        with Scratch() as folder:
            path = folder / "state"
            snapshot.write(path)
            own_file = put_file(self._reader.bucket, path, f"{name}/rank-{self._peers.rank}.safetensors")
        refs = self._peers.exchange(own_file)
        if self._writer:
            same = manifest.model_dump(include={"run", "born", "version", "digest"})
            record = StateRecord(**same, sync=sync, created_at=time.time(), ranks=tuple(refs), extra=extra)
            self._reader.bucket.put(f"{name}.json", self._writer.signed(record).to_bytes())
            _prune(self._reader, name)


def _prune(reader: RunReader, newest: str) -> None:
    """Keep the complete state `newest` and the one before. Delete all older states, their records first."""
    listing = [info.key for info in reader.bucket.list(reader.keys.states)]
    older = [key.removesuffix(".json") for key in listing if key.endswith(".json") and key < f"{newest}.json"]
    if older:
        gone = [key for key in listing if key < max(older)]
        reader.bucket.delete([key for key in gone if key.endswith(".json")])
        reader.bucket.delete([key for key in gone if not key.endswith(".json")])


class Snapshot:
    """Copies one rank's part of the state to the host. `published` has the names of the published weights.

    Raises `StateError` if a value cannot be saved.
    """

    def __init__(
        self, weights: Weights, published: Container[str], optimizer: Optimizer, others: Others, *, main: bool
    ) -> None:
        started = time.monotonic()
        kinds: dict[str, tuple[str, list[int]]] = {}
        copies: dict[str, Tensors] = {_LOW: {}, _WHOLE: {}}
        for name, tensor in weights:
            plain = name in published and (not isinstance(tensor, DTensor) or is_block(tensor))
            kind = _KINDS.get(tensor.dtype, _WHOLE) if plain else _WHOLE  # the same on all ranks
            kinds[name] = kind, list(tensor.shape)
            if kind in copies and (main or isinstance(tensor, DTensor)):
                copies[kind][name] = to_host(tensor, name)
        moments, optimizer_note = parts.take_optimizer(optimizer, main=main)
        random, random_note = parts.take_random_state()
        states = {name: as_json(other.state_dict(), f"the {name}") for name, other in others.items()}
        self._masters = copies[_LOW]
        self._tensors = {f"whole/{n}": tensor for n, tensor in copies[_WHOLE].items()} | moments | random
        self._note = {"weights": kinds, "optimizer": optimizer_note, "random": random_note, "others": states}
        _log.info("training waited %s for a copy of its state", time_text(time.monotonic() - started))

    def write(self, path: Path) -> None:
        """Write a `.safetensors` file. Frees each copy of a float32 weight as soon as it is split."""
        for name in list(self._masters):
            rest = parts.split(self._masters.pop(name).reshape(-1).numpy())
            self._tensors |= {f"{key}/{name}": tensor for key, tensor in rest.items()}
        save_file(self._tensors, path, {"note": json.dumps(self._note)})


class FoundState:
    """A downloaded state: this rank's file (`path`), and the main rank's, which also has what ranks share.

    `bits` returns a rank that has a tensor of the state's version, and on that rank the tensor. Raises
    `ProtocolError` for a file that is not a state.
    """

    def __init__(
        self, record: StateRecord, peers: Peers, path: Path, main: Path, bits: Callable[[str], RankBits]
    ) -> None:
        self.record, self._peers, self._bits = record, peers, bits
        self._note, self._main = _note(path), _note(main)
        self._files = {main: None, path: None}  # in this order, without a repetition
        # Whether the version holds at least the upper half of each weight.
        self.published_whole = all(kind != _WHOLE for kind, _ in self._note["weights"].values())

    def restore(self, live: Tensors, optimizer: Optimizer, others: Others) -> None:
        """Restore the state, on every rank. Raises `StateError` if it does not fit this trainer."""
        with self._peers.fail_together():
            self._require_same(live, others)
            tensors: Tensors = {}  # where both files have a tensor, this rank's counts
            for path in self._files:
                with safe_open(path, framework="pt") as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            with torch.no_grad():
                for name, tensor in live.items():
                    self._restore_weight(name, tensor, tensors)
            own, main = self._note["optimizer"], self._main["optimizer"]
            values, on_host = main["values"] | own["values"], {*main["on_host"], *own["on_host"]}
            parts.put_optimizer(optimizer, tensors, own | {"values": values, "on_host": on_host})
            for name, other in others.items():
                other.load_state_dict(self._note["others"][name])
            parts.put_random_state(tensors, self._note["random"])

    def _require_same(self, live: Tensors, others: Others) -> None:
        kinds = self._note["weights"]
        if strange := live.keys() ^ kinds.keys():
            where = "only in the model" if min(strange) in live else "only in the state"
            raise StateError(f"{min(strange)} is {where}: train the model that was saved, or start again")
        for name, tensor in live.items():
            kind, shape = kinds[name]
            if list(tensor.shape) != shape:
                raise StateError(f"{name} was saved with shape {shape}: train the model that was saved")
            if kind in _DTYPES and tensor.dtype != _DTYPES[kind]:
                now, then = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, _DTYPES[kind]))
                raise StateError(
                    f"{name} was {then} when the state was saved and is {now}: load the model in {then}"
                )
        if strange := others.keys() ^ self._note["others"].keys():
            owner = "this trainer" if min(strange) in others else "the saved state"
            raise StateError(f"only {owner} has a {min(strange)}: restore with the objects that you saved")

    def _restore_weight(self, name: str, tensor: torch.Tensor, tensors: Tensors) -> None:
        own, kind = local(tensor), self._note["weights"][name][0]
        if kind == _WHOLE:
            new = tensors[f"whole/{name}"]
        else:
            source, published = self._bits(name)
            published = self._peers.share(published, tensor.shape, source)
            bits = np.array(published[held_block(tensor).at], order="C")
            new = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            keys = (key for key in ("low", "index", "words") if f"{key}/{name}" in tensors)
            rest = {key: tensors[f"{key}/{name}"] for key in keys}
            if kind == _LOW and rest["low"].numel() == own.numel():
                new = parts.masters(bits.reshape(-1), rest)
        if new.dtype != own.dtype or new.numel() != own.numel():
            raise StateError(f"{name} was saved with another sharding: start as many processes as then")
        own.copy_(new.reshape(own.shape))


def _note(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            note: dict[str, Any] = json.loads((file.metadata() or {})["note"])
        if not isinstance(note, dict) or note.keys() != _NOTE:
            raise ValueError(f"it lacks {', '.join(sorted(_NOTE))}")
    except (SafetensorError, LookupError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{path.name} is not a trainer's state: {error}") from error
    return note


def find_state(reader: RunReader, outbox: Outbox, peers: Peers, folder: Path) -> FoundState | None:
    """Find the newest state that a run can resume from and download it to `folder`; None for a new run.

    Tells `outbox` which syncs the earlier trainer published after that state; if this trainer repeats them
    exactly, they are not published again. Raises `StateError` if the run has versions after version 0 but no
    state, or if another number of processes saved the state. Every rank must call it.
    """
    with peers.fail_together():
        listed = list(usable_states(reader)) if peers.main else []
    for record, later in peers.exchange(listed)[0]:
        if (saved := len(record.ranks)) != peers.size:
            raise StateError(
                f"the state was saved by {saved} processes, and now there are {peers.size}:"
                " start the old number of processes"
            )
        with peers.fail_together():
            found = _fetched(reader, outbox, record, peers, folder)
        if all(peers.exchange(found is not None)):
            outbox.repeated = RepeatedSyncs(_repeated(record, later))
            return found
    with peers.fail_together():
        newest = reader.newest() if peers.main else None
        if newest and newest.version > 0:
            raise StateError(
                f"run {reader.keys.run!r} has versions up to {newest.version}, but no state to resume from:"
                " start again from the base (`--fresh`), or from a checkout of the newest version"
            )
    if newest := peers.exchange(newest)[0]:
        outbox.repeated = RepeatedSyncs({newest.sync: newest.digest})
    return None


def usable_states(reader: RunReader) -> Iterator[tuple[StateRecord, list[Manifest]]]:
    """Yield the complete states of the run, newest first, each with the versions after it."""
    listing = {info.key: info.size for info in reader.bucket.list(reader.keys.states)}
    records: list[StateRecord] = []
    for key in sorted((key for key in listing if key.endswith(".json")), reverse=True):
        try:
            records.append(reader.read(StateRecord, key))
        except (ProtocolError, ObjectMissingError) as error:
            _log.warning("skipped a damaged trainer state: %s", error)
    oldest = min((record.version for record in records), default=None)
    later: list[Manifest] = []
    for manifest in reader.versions():
        if oldest is None or manifest.version < oldest:
            return
        for record in records:
            whole = all(listing.get(ref.key) == ref.size for ref in record.ranks)
            same = (record.born, record.version, record.digest)
            if whole and same == (manifest.born, manifest.version, manifest.digest):
                yield record, later.copy()
        later.append(manifest)


def _repeated(record: StateRecord, later: list[Manifest]) -> dict[int, str]:
    """Map sync numbers, from `record.sync` on, to the digest that an exact repetition of that sync gives.
    `later` (newest first) may hold versions that a resumed trainer replaced: these are left out."""
    line: list[Manifest] = []
    for manifest in later:
        if not line or manifest.sync < line[-1].sync:
            line.append(manifest)
    return {record.sync: record.digest} | {m.sync: m.digest for m in line if m.sync > record.sync}


def _fetched(
    reader: RunReader, outbox: Outbox, record: StateRecord, peers: Peers, folder: Path
) -> FoundState | None:
    try:
        own = reader.fetch(record.ranks[peers.rank], folder)
        main = own if peers.main else reader.fetch(record.ranks[0], folder)
        if outbox.shapes and record.version == outbox.version:
            return FoundState(record, peers, own, main, outbox.bits)
        state: dict[str, Bits] = {}
        if peers.main:
            manifest = next(manifest for manifest in reader.versions() if manifest.version == record.version)
            state = reader.rebuild(manifest, folder / "version")
        return FoundState(record, peers, own, main, lambda name: (0, state.get(name)))
    except _DAMAGED as error:
        _log.warning("skipped the damaged state of version %d: %s", record.version, error)
        return None
