"""From a training loop to versions in a bucket, in a few lines; of several processes, too."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from delta_weight_sync.checkpoint import CheckpointError
from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import to_hex
from delta_weight_sync.history import RunReader, split_run
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.pruning import Keep
from delta_weight_sync.publish.base import Base
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.outbox import Outbox, nothing
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.publish.sharded import Peers, Weights, gathered, own_digest
from delta_weight_sync.publish.shards import Shards
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket

DEFAULT_RUN = "main"


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
        self.run: RunWriter | None = None
        self.log: RunLogWriter | None = None
        self._peers = peers or Peers()
        self._resources = contextlib.ExitStack()
        with self._peers.together():
            self._shards = None if self._peers.main else Shards(mirror)
            kept = Keep.parse(keep) if keep else None
            self._outbox = self._open(url, base, encoding, mirror, kept) if self._peers.main else None

    def publish(self, weights: Weights, step: int | None = None) -> None:
        """Hand the weights over: checkpoint names, any float dtype, cast to bf16 here.

        Returns after the diff, before which no tensor may change; in the background the changes become a
        version. The first version of a run is in the bucket before this returns. Every call gives the same
        names. `step`: what the version says of itself, by default how often this was called. Raises what
        stopped the background, if something did: `FencedError`, `AccessDenied`, `CodecError`.
        """
        self.syncs += 1
        first, step = self.syncs == 1, self.syncs if step is None else step
        parts = gathered(weights, first=first, main=self._peers.main)
        with self._peers.together(parts):
            if self._outbox:
                self._outbox.publish(parts, step, list if first else self._peers.receive)
            elif self._shards and first:
                self._shards.keep(parts)
            elif self._shards:
                self._peers.send(self._shards.changes(parts))

    def flush(self, timeout_s: float = 600.0) -> Manifest:
        """Wait until all that was handed over is in the bucket; the newest version's manifest, on all ranks.

        Raises `TimeoutError`, or what stopped the background.
        """
        with self._peers.together():
            newest = self._outbox.flush(timeout_s) if self._outbox else None
        manifest: Manifest = self._peers.exchange(newest)[0]
        return manifest

    def digest(self, weights: Weights) -> str:
        """Digest of the live weights of all ranks, cast to bf16: that of the version which they are."""
        own, names = own_digest(weights, main=self._peers.main)
        kept = self._outbox.digest_without(names) if self._outbox else 0
        return to_hex(sum(self._peers.exchange(own + kept)))

    def close(self) -> None:
        """Stop; what was not flushed stays unpublished. Raises `BucketError` if the log cannot be written."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush, unless something failed, and close."""
        with contextlib.closing(self):
            if kind is None and self.syncs:
                self.flush()

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
