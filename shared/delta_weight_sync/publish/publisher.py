"""From a training loop to versions in a bucket, in a few lines; of several processes, too."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from delta_weight_sync.checkpoint import CheckpointError
from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import to_hex
from delta_weight_sync.history import RunReader, split_run
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.pruning import Keep
from delta_weight_sync.publish.base import Base
from delta_weight_sync.publish.comparing import nothing
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.optimizer_state import StateError
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.past import Past
from delta_weight_sync.publish.risen import Risen, rise
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.publish.sharded import Peers, Weights, gathered, own_digest
from delta_weight_sync.publish.shards import Shards
from delta_weight_sync.publish.snapshot import Stateful, take
from delta_weight_sync.publish.states import StateKeeper, StateRecord
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket

DEFAULT_RUN = "main"
_PATIENCE_S = 600.0


class Publisher:
    """Publishes a model's weights as versions of one run; only what changed travels.

        with Publisher("hf://buckets/me/wordle#first", base="Qwen/Qwen3-0.6B") as publisher:
            for step in range(100):
                ...
                publisher.publish(model.named_parameters(), step)

    Where `torch.distributed` is initialized, all ranks create it and call the same methods in the same order;
    parameters may be FSDP2's. The first rank alone writes to the bucket. What fails on one rank is raised
    there, and as a `PeerError` on the others.
    """

    def __init__(
        self,
        url: str,
        base: str | Path | None = None,
        *,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        keep: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Open the run, which fences off any other writer of it.

        `url`: of the bucket, which is created where it does not exist, and the run's name behind a `#`
        ("main" if there is none). `base`: the checkpoint that the policy was loaded from, a folder or the id
        of a model on the Hub; a new run takes from it config, tokenizer and whatever is not trained. A run
        that exists goes on from its newest version. `encoding`: of deltas, see `delta_weight_sync.codec`.
        Where DELTA_WEIGHT_SYNC_SIGNING_KEY is set every version is signed, see `delta_weight_sync.signing`.
        `mirror`: where the published bits are kept, "host" or (on a GPU) "device". `keep`: how much of the
        run stays in the bucket, "20GB" or "7d", or None for all of it; see `delta_weight_sync.pruning`.
        `peers`: who publishes together, if not all ranks. Raises `CheckpointError`, `BucketError`,
        `KeepError`, `ProtocolError`.
        """
        self.syncs = 0
        self.state: StateRecord | None = None
        self.run: RunWriter | None = None
        self.log: RunLogWriter | None = None
        self._begun, self._handed_over = False, set[str]()
        self._risen: Risen | None = None
        self._peers = peers or Peers()
        self._resources = contextlib.ExitStack()
        with self._peers.together():
            self._shards = None if self._peers.main else Shards(mirror)
            kept = Keep.parse(keep) if keep else None
            self._outbox = self._open(url, base, encoding, mirror, kept) if self._peers.main else None
        place, run = split_run(url)
        self._reader = self.run.reader if self.run else RunReader(open_bucket(place), run or DEFAULT_RUN)
        others = Peers(alone=self._peers.size == 1)  # in the background ranks talk beside what they say here
        self._keeper = StateKeeper(self._reader, others, self._pinned, self._signed)

    def publish(self, weights: Weights, step: int | None = None) -> None:
        """Hand the weights over: checkpoint names, any float dtype, cast to bf16 here.

        Returns after the diff, before which no tensor may change; in the background the changes become a
        version. The first version of a run is in the bucket before this returns. Every call gives the same
        names. `step`: what the version says of itself, by default how often this was called. Raises what
        stopped the background, if something did: `FencedError`, `AccessDenied`, `CodecError`.
        """
        self.syncs = self.syncs + 1 if step is None else step
        first, self._begun = not self._begun, True
        parts = gathered(self._named(weights), first=first, main=self._peers.main)
        with self._peers.together(parts):
            if self._outbox:
                self._outbox.publish(parts, self.syncs, list if first else self._peers.receive)
            elif self._shards and first:
                self._shards.keep(parts)
            elif self._shards:
                self._peers.send(self._shards.changes(parts))

    @property
    def agreed(self) -> int:
        """Up to which sync the run's trainer before this one did the same; 0 if this one began anew."""
        return self._outbox.waiting.replay.agreed if self._outbox else 0

    def remember(self, syncs: int) -> Past:
        """On the main rank, after `publish`: keep what the newest `syncs` hand-overs from here on change."""
        assert self._outbox, "the other ranks do not know what changed"
        self._outbox.waiting.past = past = Past(self.syncs, syncs)
        return past

    def find_state(self) -> StateRecord | None:
        """The newest state to go on from, in `state` too; None for a run that has only just begun.

        From here on what the trainer before has published since is not published again. Every rank reads
        the bucket. Raises `StateError` if the run has versions but no state, or one of more or fewer ranks.
        """
        folder = tempfile.TemporaryDirectory()
        self._resources.callback(folder.cleanup)
        self._risen = rise(self._reader, self._outbox, self._peers, Path(folder.name))
        self.state = self._risen.record if self._risen else None
        return self.state

    def restore(
        self, weights: Weights, optimizer: torch.optim.Optimizer, **others: Stateful
    ) -> dict[str, Any] | None:
        """Go on from the newest state: what `save_state` was given, in its place; returns its `extra`.

        Weights, the optimizer's memory, that of the `others`, and the random numbers of this process are
        those of the moment at which the state was saved, bit for bit. None, and nothing changed, for a run
        that has only just begun. Raises `StateError` for another model, optimizer or number of ranks, and as
        `find_state`.
        """
        if self._risen is None and self.find_state() is None:
            return None
        risen, self._risen = self._risen, None
        assert risen is not None
        live = dict(weights)
        risen.put(live.items(), optimizer, others)
        if risen.saved.published_whole and self.digest(live.items()) != risen.record.digest:
            raise StateError(
                f"what was put back is not version {risen.record.version}: save right after the hand-over"
            )
        self.syncs = risen.record.sync
        return risen.record.extra

    def save_state(
        self,
        weights: Weights,
        optimizer: torch.optim.Optimizer,
        *,
        extra: dict[str, Any] | None = None,
        **others: Stateful,
    ) -> bool:
        """Keep all that this trainer needs to go on from here; to be called right after `publish`.

        Returns once it is copied to the host, but for a run's first state; it goes into the bucket in the
        background, after its version. False if nothing was copied, since another one is on its way there, or
        since what was handed over was published before. `weights`: every tensor that training changes, under
        the names of `publish`. `others`: schedule, scaler. `extra`: JSON of yours, such as how much data was
        used. Raises `StateError` for what cannot be kept.
        """
        ready = not self._keeper.busy and (self._outbox is None or self._outbox.pin())
        if not all(self._peers.exchange(ready)):
            return False
        with self._peers.together():
            copied = take(weights, self._handed_over, optimizer, others, main=self._peers.main)
        first = self.state is None and not self._keeper.used
        self._keeper.keep(copied, self.syncs, extra or {})
        if first:
            self._keeper.require(_PATIENCE_S)
        return True

    def flush(self, timeout_s: float = _PATIENCE_S) -> Manifest:
        """Wait until all that was handed over is in the bucket, and the state that was saved.

        Returns the newest version's manifest, on all ranks. Raises `TimeoutError`, or what stopped the
        background.
        """
        with self._peers.together():
            newest = self._outbox.flush(timeout_s) if self._outbox else None
            self._keeper.wait(timeout_s)
        manifest: Manifest = self._peers.exchange(newest)[0]
        return manifest

    def digest(self, weights: Weights) -> str:
        """Digest of the live weights of all ranks, cast to bf16: that of the version which they are."""
        own, names = own_digest(weights, main=self._peers.main)
        kept = self._outbox.mirror.digest_without(names) if self._outbox else 0
        return to_hex(sum(self._peers.exchange(own + kept)))

    def close(self) -> None:
        """Stop; what was not flushed stays unpublished. Raises `BucketError` if the log cannot be written."""
        self._resources.close()
        self._keeper.wait(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush, unless something failed, and close."""
        with contextlib.closing(self):
            if kind is None and self._begun:
                self.flush()

    def _named(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self._handed_over.add(name)
            yield name, tensor

    def _signed(self, record: StateRecord) -> StateRecord:
        return self.run.signed(record) if self.run else record

    def _pinned(self) -> Manifest | None:
        return self._outbox.pinned() if self._outbox else None

    def _open(
        self, url: str, base: str | Path | None, encoding: Encoding, mirror: Place, keep: Keep | None
    ) -> Outbox:
        with contextlib.ExitStack() as stack:
            start = Base(base) if base is not None else None
            self.run = _writer(url, start, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            self.log = stack.enter_context(
                contextlib.closing(RunLogWriter(self.run.bucket, self.run.keys.run))
            )
            rest = start.rest if start else nothing
            outbox = Outbox(self.run, self.log, encoding=encoding, mirror=mirror, rest=rest, keep=keep)
            stack.enter_context(contextlib.closing(outbox))
            self._resources = stack.pop_all()
            return outbox


def _writer(url: str, base: Base | None, folder: Path) -> RunWriter:
    """The run's writer; `folder` is for the files beside the weights, as long as it lives."""
    place, named = split_run(url)
    bucket, run = open_bucket(place, create=True), named or DEFAULT_RUN
    if base:
        base.write_files(folder)
        return RunWriter(bucket, run, model=base.name, assets=folder)
    if RunReader(bucket, run).newest() is None:
        raise CheckpointError(
            f"run {run!r} in {bucket.url} is new: name the checkpoint that the policy was loaded from,"
            ' as in base="Qwen/Qwen3-0.6B"; its config and tokenizer are published, too'
        )
    return RunWriter(bucket, run, model="", assets=None)
