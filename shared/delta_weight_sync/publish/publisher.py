"""From a training loop, of one process or several, to versions in a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, get_args

import torch
from torch.distributed.checkpoint.stateful import Stateful

from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import to_hex
from delta_weight_sync.errors import CheckpointError, ConfigError, StateError
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish._base import Base
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.outbox import Outbox, RepeatedSyncs, UndoLog
from delta_weight_sync.publish.sharding import Peers, Shards, Weights, gathered, own_digest
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader, split_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.resume._state import FoundState, Snapshot, StateRecord, StateSaver, find_state
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import writer_keys
from delta_weight_sync.store import open_bucket

__all__ = ["Publisher", "PublisherOptions"]
DEFAULT_RUN = "main"
_TIMEOUT_S = 600.0


class PublisherOptions(TypedDict, total=False):
    """Optional arguments of a `Publisher`; its documentation describes them."""

    encoding: Encoding
    mirror: Place
    keep: str | None
    signing_key: str | Path | None
    on_version: Callable[[Manifest], object] | None


class Publisher:
    """Publishes a model's weights as versions of one run; only the changed weights travel.

        with Publisher("hf://buckets/me/wordle#first", base="Qwen/Qwen3-0.6B") as publisher:
            for step in range(100):
                ...
                publisher.publish(model.named_parameters(), step)

    If `torch.distributed` is initialized, all ranks create it and call the same methods in the same order;
    parameters may be FSDP2's. Only rank 0, the main rank, writes to the bucket. An error on one rank is
    raised there, and as a `PeerError` on the others.

    Opening the run fences off any other writer. An existing run continues from its newest version.

    Args:
        url: The bucket, which is created if missing, and the run's name after a `#` ("main" by default).
        base: The checkpoint that the policy was loaded from, a folder or the id of a model on the Hub. A new
            run needs it: config, tokenizer and untrained weights come from it.
        encoding: Encoding of deltas, "fast" or "small"; see `delta_weight_sync.codec`.
        mirror: Which memory holds the published bits, "host" or (on a GPU) "device".
        keep: How much of the run stays in the bucket, such as "20GB" or "7d"; by default all of it.
        signing_key: The key that signs every version, or the file that `delta-weight-sync keygen` wrote. By
            default the key in DELTA_WEIGHT_SYNC_SIGNING_KEY, if that is set.
        on_version: Called on the main rank with the manifest of each published version.
        peers: The processes that publish together, if not all ranks.

    Attributes:
        sync: The number of the newest sync.
        reader: Reads the run that is published.
        log: The run's log; None on ranks other than the main one.
        resumed_from: The state that `find_state` or `restore` found.

    Raises:
        ConfigError: An argument is none of the allowed values.
        CheckpointError: `base` is missing or is not a checkpoint.
        BucketError, ProtocolError: The bucket or the run cannot be used.
    """

    def __init__(
        self,
        url: str,
        base: str | Path | None = None,
        *,
        peers: Peers | None = None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        self.sync = 0
        self.resumed_from: StateRecord | None = None
        self.log: RunLogWriter | None = None
        self.reader: RunReader
        self._writer: RunWriter | None = None
        self._outbox: Outbox | None = None
        self._shards: Shards | None = None
        self._begun, self._published = False, set[str]()  # names
        self._found: FoundState | None = None
        self._peers = peers or Peers()
        self._resources = contextlib.ExitStack()
        with self._peers.fail_together():
            mirror = _allowed("mirror", options.get("mirror", "host"), Place)
            encoding = _allowed("encoding", options.get("encoding", "fast"), Encoding)
            if self._peers.main:
                self._open(url, base, encoding, mirror, options)
            else:
                self._shards = Shards(mirror)
        if self._writer:
            self.reader = self._writer.reader
        else:
            place, run = split_run(url)
            trusted = writer_keys(options.get("signing_key"))[1]
            self.reader = RunReader(open_bucket(place), run or DEFAULT_RUN, trusted)
        others = Peers(alone=self._peers.size == 1)  # for the background, on a channel of its own
        self._saver = StateSaver(self.reader, others, self._outbox, self._writer)

    @property
    def is_main(self) -> bool:
        """Whether this rank publishes."""
        return self._peers.main

    @property
    def writer_term(self) -> int:
        """The number of trainers that have opened this run, this one included; 0 on the other ranks."""
        return self._writer.writer.term if self._writer else 0

    @property
    def repeated_sync(self) -> int:
        """The newest sync whose weights this trainer and the run's earlier one share; 0 if there is none."""
        return self._outbox.repeated.newest if self._outbox else 0

    def publish_base(self, weights: Weights, step: int = 0) -> None:
        """Publish version 0 of a new run; for a run that has versions, only check that it is of this model.

        For a trainer that publishes before it shards its model: only the main rank needs the weights. The
        first `publish` adds a version only if the weights have changed.

        Raises:
            CodecError: The run is of another model.
        """
        if not self._peers.exchange(self._outbox is not None and not self._outbox.mirror)[0]:
            with self._peers.fail_together():
                if self._outbox:
                    self._outbox.require_same_model(weights)
            return
        parts = gathered(weights, first=True, main=self._peers.main)
        with self._peers.fail_together(parts):
            if self._outbox:
                self._outbox.publish(parts, step)
                self._outbox.repeated = RepeatedSyncs({step: self._outbox.flush().digest})
            else:
                for _ in parts:
                    pass

    def publish(self, weights: Weights, step: int | None = None) -> None:
        """Publish the weights as a new version; returns after the diff.

        Do not change the tensors before this returns. A background thread turns the changes into a version.
        The first version of a run is in the bucket before this returns.

        Args:
            weights: Checkpoint names and tensors of any float dtype, cast to bf16; always the same names.
            step: Recorded as the version's `sync`; by default the number of calls.

        Raises:
            FencedError, AccessDeniedError, CodecError: What stopped the background thread, or this call.
        """
        self.sync = self.sync + 1 if step is None else step
        first, self._begun = not self._begun, True
        parts = gathered(self._named(weights), first=first, main=self._peers.main)
        with self._peers.fail_together(parts):
            if self._outbox:
                self._outbox.publish(parts, self.sync, list if first else self._peers.receive)
            elif self._shards and first:
                self._shards.begin(parts)
            elif self._shards:
                self._peers.send(self._shards.changes(parts))

    def keep_undo_log(self, syncs: int) -> UndoLog:
        """From here on, log what the newest `syncs` syncs changed; on the main rank, after `publish`.

        Raises:
            ConfigError: This is not the main rank, the only one that knows all changes.
        """
        if self._outbox is None:
            raise ConfigError("only the main rank can keep an undo log: call `keep_undo_log` if `is_main`")
        self._outbox.undo_log = log = UndoLog(self.sync, syncs)
        return log

    def find_state(self) -> StateRecord | None:
        """Find the newest state to resume from and set `resumed_from` to it; None for a new run.

        From here on, versions that the earlier trainer published after that state are not published again.
        Every rank reads the bucket.

        Raises:
            StateError: The run has versions but no state, or a state of another number of ranks.
        """
        folder = self._resources.enter_context(Scratch())
        self._found = find_state(self.reader, self._outbox, self._peers, folder)
        self.resumed_from = self._found.record if self._found else None
        return self.resumed_from

    def restore(
        self, weights: Weights, optimizer: torch.optim.Optimizer, **others: Stateful
    ) -> dict[str, Any] | None:
        """Resume from the newest state: put back what `save_state` saved, bit for bit.

        That includes the random numbers of this process. Returns the `extra` of `save_state`; None, with
        nothing changed, for a new run.

        Raises:
            StateError: The state is of another model, optimizer or number of ranks; or as `find_state`.
        """
        if self._found is None and self.find_state() is None:
            return None
        found, self._found = self._found, None
        assert found is not None
        live = dict(weights)
        found.restore(live, optimizer, others)
        if found.published_whole and self.digest(live.items()) != found.record.digest:
            raise StateError(
                f"the restored weights are not those of version {found.record.version}: call `save_state`"
                " right after `publish`"
            )
        self.sync = found.record.sync
        return found.record.extra

    def save_state(
        self,
        weights: Weights,
        optimizer: torch.optim.Optimizer,
        *,
        extra: dict[str, Any] | None = None,
        **others: Stateful,
    ) -> bool:
        """Save everything that a trainer needs to resume here; call it right after `publish`.

        Returns once the state is copied to the host; the first state of a run is in the bucket by then. Later
        ones go there in the background, after their version.

        Args:
            weights: Every tensor that training changes, under the names of `publish`.
            optimizer: Its state, such as moments, is saved.
            extra: JSON of your own, such as the number of samples used.
            **others: Learning rate schedule, gradient scaler.

        Returns:
            False while another state is on its way, or while it repeats syncs that the bucket has already.

        Raises:
            StateError: A value cannot be saved.
        """
        ready = not self._saver.busy and (self._outbox is None or self._outbox.pin())
        if not all(self._peers.exchange(ready)):
            return False
        with self._peers.fail_together():
            snapshot = Snapshot(weights, self._published, optimizer, others, main=self._peers.main)
        first = self.resumed_from is None and not self._saver.used
        self._saver.save(snapshot, self.sync, extra or {})
        if first:
            self._saver.require(_TIMEOUT_S)
        return True

    def flush(self, timeout_s: float = _TIMEOUT_S) -> Manifest:
        """Wait until every sync and saved state is in the bucket; returns the newest manifest, on all ranks.

        Raises:
            TimeoutError: It takes longer than `timeout_s`.
            DeltaWeightSyncError: What stopped the background thread.
        """
        with self._peers.fail_together():
            newest = self._outbox.flush(timeout_s) if self._outbox else None
            self._saver.wait(timeout_s)
        manifest: Manifest = self._peers.exchange(newest)[0]
        return manifest

    def digest(self, weights: Weights) -> str:
        """Digest of the live weights of all ranks, cast to bf16: that of a version with the same weights."""
        own, names = own_digest(weights, main=self._peers.main)
        untrained = self._outbox.mirror.digest_without(names) if self._outbox else 0
        return to_hex(sum(self._peers.exchange(own + untrained)))

    def close(self) -> None:
        """Stop; what was not flushed stays unpublished. Raises `BucketError` if the log cannot be written."""
        self._resources.close()
        self._saver.wait(_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; flush first, unless an exception ends the block."""
        with contextlib.closing(self):
            if kind is None and self._begun:
                self.flush()

    def _named(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self._published.add(name)
            yield name, tensor

    def _open(
        self, url: str, base: str | Path | None, encoding: Encoding, mirror: Place, options: PublisherOptions
    ) -> None:
        place, named = split_run(url)
        keep, on_version, key = options.get("keep"), options.get("on_version"), options.get("signing_key")
        limit = Keep.parse(keep) if keep else None
        start = Base(base) if base is not None else None
        bucket, run = open_bucket(place, create=True), named or DEFAULT_RUN
        with contextlib.ExitStack() as stack:
            assets = stack.enter_context(Scratch())
            if start:
                start.write_files(assets)
            elif RunReader(bucket, run, writer_keys(key)[1]).newest() is None:
                raise CheckpointError(
                    f"run {run!r} in {bucket.url} is new: name the checkpoint that the policy was loaded"
                    ' from, as in base="Qwen/Qwen3-0.6B"; its config and tokenizer are published, too'
                )
            model = start.name if start else ""
            writer = RunWriter(bucket, run, model=model, assets=assets if start else None, signing_key=key)
            if on_version:
                writer.on_version = on_version
            log = stack.enter_context(contextlib.closing(RunLogWriter(bucket, run)))
            untrained = start.untrained if start else None
            outbox = Outbox(writer, log, encoding=encoding, mirror=mirror, untrained=untrained, keep=limit)
            stack.enter_context(contextlib.closing(outbox))
            self._writer, self.log, self._outbox, self._resources = writer, log, outbox, stack.pop_all()


def _allowed(argument: str, value: Any, kind: Any) -> Any:
    if value not in get_args(kind):
        raise ConfigError(f"{argument} is {value!r}, not one of {', '.join(map(repr, get_args(kind)))}")
    return value
