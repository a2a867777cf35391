"""The newest state that a run can be gone on from, with all that belongs to it on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from delta_weight_sync.codec import Bits, CodecError
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.publish.optimizer_state import StateError
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.replay import Replay
from delta_weight_sync.publish.sharded import Peers, Weights
from delta_weight_sync.publish.snapshot import Saved, Stateful
from delta_weight_sync.publish.states import StateRecord, repeated, usable
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import ObjectMissing

_DAMAGED = (ProtocolError, CodecError, ObjectMissing, SafetensorError)
_log = logging.getLogger("delta_weight_sync")


@dataclass(frozen=True)
class Risen:
    """A state whose objects are here and whole; `bits` gives the weights of its version, on the main rank."""

    record: StateRecord
    peers: Peers
    saved: Saved
    bits: Callable[[str], Bits] | None

    def put(self, weights: Weights, optimizer: torch.optim.Optimizer, others: dict[str, Stateful]) -> None:
        """Put it into the live trainer, on all ranks alike; `StateError` if that is another one."""

        def published(name: str, shape: torch.Size) -> Bits:
            return self.peers.share(self.bits(name) if self.bits else None, shape)

        with self.peers.together():
            self.saved.put(weights, published, optimizer, others)


def rise(reader: RunReader, outbox: Outbox | None, peers: Peers, folder: Path) -> Risen | None:
    """Find the newest state, whose objects come into `folder`; None for a run that has only just begun.

    What the trainer before published since is not published again. Raises `StateError` if there are
    versions and no state, or one of another number of processes.
    """
    with peers.together():
        found = list(usable(reader)) if outbox else []
    for record, later in peers.exchange(found)[0]:
        if len(record.ranks) != peers.size:
            raise StateError(
                f"the state was saved by {len(record.ranks)} processes, not {peers.size}: start as many again"
            )
        with peers.together():
            risen = _fetched(reader, outbox, record, peers, folder)
        if all(peers.exchange(risen is not None)):
            if outbox:
                outbox.waiting.replay = Replay(repeated(record, later))
            return risen
    with peers.together():
        _begin(reader, outbox)
    return None


def _begin(reader: RunReader, outbox: Outbox | None) -> None:
    newest = reader.newest() if outbox else None
    if newest and newest.version > 0:
        raise StateError(
            f"run {reader.keys.run!r} has versions up to {newest.version}, but no state that a trainer can"
            " go on from: begin again from the base (`--fresh`), or from a checkout of the newest version"
        )
    if newest and outbox:
        outbox.waiting.replay = Replay({newest.sync: newest.digest})


def _fetched(
    reader: RunReader, outbox: Outbox | None, record: StateRecord, peers: Peers, folder: Path
) -> Risen | None:
    try:
        own = reader.fetch(record.ranks[peers.rank], folder)
        saved = Saved(own, own if peers.main else reader.fetch(record.ranks[0], folder))
        return Risen(record, peers, saved, _bits(reader, outbox, record, folder) if outbox else None)
    except _DAMAGED as error:
        _log.warning("the state of version %d is passed over: %s", record.version, error)
        return None


def _bits(reader: RunReader, outbox: Outbox, record: StateRecord, folder: Path) -> Callable[[str], Bits]:
    if record.version == outbox.version and outbox.mirror:
        return outbox.mirror.bits
    return reader.checkout(_manifest(reader, record), folder / "version").__getitem__


def _manifest(reader: RunReader, record: StateRecord) -> Manifest:
    return next(manifest for manifest in reader.history() if manifest.version == record.version)
