"""Finds what each sync (a hand-over of weights) changed, and publishes the changes in the background.

Version 0 is published whole, as an anchor. If a trainer starts and finds the newest version damaged, the next
version is published whole, too. The trainer waits until such an anchor is uploaded. For other versions, the
trainer waits only for the diff. A background thread then encodes and uploads, and tries again if the bucket
fails. Meanwhile later syncs are merged into one pending update. (Only after `pin`, there may be several: the
outbox merges no later sync into a pinned one.) At all times

    published bits  +  the update in flight  +  the pending updates  =  mirror

So no change is lost. To get a tensor's bits at a published version, the outbox copies the tensor from the
mirror, and undoes in the copy what came after the version: pending updates, the update in flight, and perhaps
versions whose changes `shortcuts` still has. A concurrent sync waits for the copy of one tensor at most.

Each rank has an outbox for the tensors that it owns. The outboxes publish in step: the same syncs become the
same update on all ranks. Each outbox stores its part of the delta; then rank 0 publishes the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from delta_weight_sync import codec, errors
from delta_weight_sync.checkpoint import ADAPTER, INDEX, WEIGHTS, Spec, Specs, dtypes_in, to_bits, write_bits
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.hub_copy import HubCopy, fingerprint
from delta_weight_sync.publish.mirror import Mirror, Place
from delta_weight_sync.publish.reports import Counts, Reports
from delta_weight_sync.publish.sharding import Held, Owners, Peers, Shards, union
from delta_weight_sync.publish.shortcuts import Published, Shortcuts, consumed
from delta_weight_sync.publish.spans import undo
from delta_weight_sync.publish.undo import UndoLog
from delta_weight_sync.publish.writer import PartWriter, RunWriter
from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Manifest
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.util import SafeLogger

Untrained = Callable[[Specs, Iterable[str], Callable[[str], Bits]], Iterable[tuple[str, str, Bits]]]
Kind = TypeVar("Kind")
_FILE_BYTES = 5_000_000_000  # limit of bytes of an anchor's file; a larger tensor has a file of its own
_CLOSING_S = 60.0  # seconds that a rank waits for its background thread, which may wait for other ranks
_RETRY_S = 2.0
_REMIND_S = 60.0  # seconds between two warnings that a version has not reached the bucket
_log = SafeLogger()


class RepeatedSyncs:
    """Syncs that a trainer repeats, for example the syncs after the state from which the trainer resumed.
    The bucket has the weights of these syncs, so they are not published again."""

    def __init__(self, published: Mapping[int, str]) -> None:
        """`published`: sync -> digest of the versions in the bucket that an exact repetition reproduces."""
        self.published = published
        # The newest sync that was repeated exactly. Before the first repetition, the oldest in `published`.
        self.newest = min(published, default=0)

    def holds_back(self, sync: int, digest: str) -> bool:
        """Whether the bucket has this sync, perhaps merged into a later one. Once a sync had another digest
        than published, the answer is always False."""
        if sync > max(self.published, default=-1) or self.published.get(sync, digest) != digest:
            self.published = {}
            return False
        if sync in self.published:
            self.newest = sync
        return True


@dataclasses.dataclass(frozen=True)
class PendingUpdate:
    """The changes that one version will hold, and the digest of the weights after these changes."""

    patches: list[Patch]  # of the tensors that this rank owns
    digest: str  # of all tensors
    own: str  # digest of the tensors that this rank owns
    sync: int
    created_at: float  # unix seconds
    diff_s: float

    @functools.cached_property
    def by_name(self) -> dict[str, Patch]:
        """The patch of each changed tensor."""
        return {patch.name: patch for patch in self.patches}

    def then(self, later: PendingUpdate) -> PendingUpdate:
        """Return this update and a later one as one update."""
        return dataclasses.replace(later, patches=codec.merge(self.patches, later.patches))


class Outbox:
    """Publishes what one rank owns. In the trainer's thread, all ranks create their outboxes at the same
    time, and publish at the same time. Only rank 0 has a `log`, and calls `flush`, `pin` and `pinned`.
    `writer` is a `RunWriter` on rank 0, otherwise a `PartWriter`. `untrained`, on rank 0, returns the tensors
    that are not trained (name, dtype, words). `untrained` gets the trained tensors' specs, the names of the
    tensors that rank 0 owns, and a function: name -> words of a tensor that rank 0 owns. `hub_copy`, on rank
    0, copies the base's files instead of an upload of version 0. `adapter`: the tensors are PEFT's, which
    reads one file, so rank 0 owns all of them.
    """

    def __init__(
        self,
        writer: PartWriter,
        log: RunLogWriter | None,
        *,
        peers: Peers | None = None,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        untrained: Untrained | None = None,
        hub_copy: HubCopy | None = None,
        keep: Keep | None = None,
        finite: bool = True,
        adapter: bool = False,
    ) -> None:
        self._writer = writer
        self._encoding = encoding
        self._untrained = untrained
        self._hub_copy = hub_copy
        self._peers = peers or Peers(alone=True)
        # A second process group, because the background thread must not share the trainer's collectives.
        self._thread_peers = Peers(alone=self._peers.size == 1)
        self._adapter = adapter
        self.owners = Owners(1 if adapter else self._peers.size)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the words of all tensors
        self.dtypes: dict[str, str] = {}  # of all tensors
        self._finite = finite
        self.mirror = Mirror(mirror, finite=finite)  # the newest sync's bits of this rank's tensors
        self._shards = Shards(mirror, finite=finite)
        self.digest = ""  # of all tensors at the newest sync
        self.repeated = RepeatedSyncs({})  # syncs to hold back, because the bucket has them
        self.refused = ""  # the digest of version 0, if the first sync must not go back to it
        self.undo_log: UndoLog | None = None  # gets the changes of every sync
        self._names: set[str] = set()  # of the tensors that every sync must hand over
        self._files: dict[str, list[str]] = {}  # each checkpoint file of this rank -> its tensors
        self._index = ""  # content of the checkpoint's index, on rank 0 and if there are several files
        self._words = 0  # of all tensors
        self._full_bytes = 0
        self._reports = Reports(writer, log)
        self._updates: list[PendingUpdate] = []  # oldest first; all merged into one, unless one is pinned
        self._held = False  # the newest sync is held back, because the bucket has it
        self._pinned: tuple[str, Manifest | None] = "", None  # digest of the pinned sync; manifest if stored
        self._busy = False
        self._closed = False
        self._reported = True  # whether the version in flight, if any, is in the bucket already
        self._failure: BaseException | None = None
        self._trouble: errors.BucketError | None = None  # why the version in flight is not in the bucket yet
        self._changed = threading.Condition()
        self.shortcuts = Shortcuts(writer, encoding, keep, self._changed, self._bits, self._write)
        try:
            self._resume()
        except BaseException:
            self.shortcuts.close()
            raise
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The newest version in the bucket; None if there is none."""
        return self._writer.newest.version if self._writer.newest else None

    @property
    def specs(self) -> dict[str, Spec]:
        """Dtype and shape of all tensors of a version; empty before the first."""
        return {name: Spec.of_words(self.dtypes[name], words) for name, words in self.shapes.items()}

    def owns(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this rank owns a tensor. A new tensor gets an owner first."""
        return self.owners.of(name, shape) == self._peers.rank

    def publish(self, weights: Iterable[Held], sync: int, *, first: bool = False) -> None:
        """Like `Publisher.publish`. `first`: whether this is the trainer's first sync. `weights` must come
        from `gathered` with the same `first`."""
        self._raise_failure()
        try:
            if self.shapes:
                self._add(weights, sync, first)
            else:
                self._publish_first(weights, sync)
        except BaseException as error:
            self._failure = error  # the mirror may hold changes that no update holds: stop publishing
            raise

    def publish_base(self, weights: Iterable[Held], sync: int) -> None:
        """Publish the first version from the whole weights that rank 0 has."""
        try:
            started = time.perf_counter()
            created_at = time.time()
            self._spread(self._checked(weights))
            self._publish_whole(sync, started, created_at)
        except BaseException as error:
            self._failure = error
            raise

    def require_same(self, name: str, shape: Sequence[int]) -> None:
        """Raise `CodecError` unless the run has this parameter, in this shape."""
        if name not in self.shapes:
            raise errors.CodecError(
                f"parameter {name} is not part of the run; start a new run for a new model"
            )
        if self.shapes[name] != tuple(shape):
            raise errors.CodecError(
                f"{name}: shape changed from {self.shapes[name]} to {tuple(shape)}; start a new run for it"
            )

    def _require_not_refused(self) -> None:
        """Raise `ConfigError` for the weights of version 0 in a run that is ahead. All ranks know the same
        digests, so all of them raise it."""
        newest = self._writer.newest
        if newest and self.digest == self.refused != newest.digest:
            place = f"{self._writer.bucket.url}#{self._writer.keys.run}"
            raise errors.ConfigError(
                f"{place} has versions up to {newest.version}, but this trainer starts with the weights of"
                " version 0, which replicas would take for new ones: resume from the trainer's own checkpoint"
                " (`train(resume_from_checkpoint=True)`), load the newest version as the model"
                f" (`delta-weight-sync checkout {place} --out FOLDER`), choose another run name, or set"
                " fresh=True to start this run again"
            )

    def release(self) -> None:
        """Publish the newest sync if it is held back and no version has its weights. All ranks call this.

        If the earlier trainer merged several syncs into one version, the digests of all but the last are
        unknown, and these syncs are held back. Only the last shows whether this trainer repeats them. But a
        trainer that ends or waits before may have taken another course.
        """
        with self._changed:
            if self._held and self.digest not in self.repeated.published.values():
                self.repeated.published = {}
                self._held = False
                self._changed.notify_all()

    def flush(self, timeout_s: float = 600.0) -> Manifest:
        """Wait until every sync is published, unless it is held back (see `release`). Returns the newest
        manifest. Raises `TimeoutError`, or the error that stopped the publisher.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: self._failure or self._idle(), timeout_s)
        self._raise_failure()
        if not idle or self._writer.newest is None:
            why = self._trouble or "no request has failed, so allow more time"
            raise TimeoutError(f"the last version is not in the bucket after {timeout_s:.0f} s: {why}")
        return self._writer.newest

    def close(self) -> None:
        """Stop the background thread. Syncs that were not flushed may stay unpublished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The threads of several ranks end together. If a rank does not close, do not wait for it forever.
        self._thread.join(None if self._peers.size == 1 else _CLOSING_S)
        self.shortcuts.close()
        self._reports.close()

    def pin(self) -> bool:
        """Merge no later sync into the last one, so that a version will have exactly the last sync's weights.
        Return False if no version will: the bucket has the last sync, but not as the newest version."""
        with self._changed:
            digest = self.digest
            newest = self._writer.newest
            pending = not self._reported or (self._updates and not self._held)
            there = newest and newest.digest == digest and not pending
            if self._held and not there:
                return False
            self._pinned = digest, newest if there else None
            return True

    def pinned(self) -> Manifest | None:
        """Wait for the version that `pin` asked for, and return it. None if the outbox fails or is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._failure or self._pinned[1])
            return self._pinned[1]

    def _resume(self) -> None:
        """Start from the newest version. If that version is damaged, the next sync publishes an anchor."""
        if (newest := self._writer.newest) is None:
            return
        found = list[tuple[str, str, Bits]]()
        folder = self.shortcuts.folder / "resumed"
        if self._peers.main:
            try:
                bits = self._writer.reader.checkout(newest, folder)
                dtypes = dtypes_in(folder)
                found = [
                    (name, dtypes[name], words.astype("uint16", copy=False)) for name, words in bits.items()
                ]
            except (errors.ProtocolError, errors.CodecError, errors.ObjectMissingError, SafetensorError) as e:
                damaged = "the newest version cannot be rebuilt, so the next sync uploads all weights: %s"
                _log.warning(damaged, e)
        self._spread(found)
        del found
        shutil.rmtree(folder, ignore_errors=True)
        if self.shapes:
            self.digest = newest.digest
            self._lay_out()
            self.shortcuts.restart(newest.version, to_hex(self.mirror.digest), self.mirror.shapes)

    def _checked(self, weights: Iterable[Held]) -> Iterator[tuple[str, str, Bits]]:
        for held in weights:
            bits = to_bits(held.tensor)
            self._require_finite(held)
            if held.dtype == "BF16":
                self.mirror.require_finite(held.name, bits)
            yield held.name, held.dtype, bits

    def _require_finite(self, held: Held) -> None:
        if self._finite:
            held.require_finite()

    def _spread(self, tensors: Iterable[tuple[str, str, Bits]]) -> None:
        """Send each of rank 0's tensors to its owner, whose mirror then holds the tensor."""
        for name, dtype, shape, bits in self._peers.scatter(tensors, self.owners):
            self.shapes[name] = shape
            self.dtypes[name] = dtype
            if bits is not None:
                self.mirror.add(name, torch.from_numpy(bits).view(torch.bfloat16), dtype)

    def _lay_out(self) -> None:
        """Divide the tensors among the files of a checkpoint."""
        specs = self.specs
        self._words = sum(map(math.prod, self.shapes.values()))
        self._full_bytes = sum(spec.nbytes for spec in specs.values())
        files = list[list[str]]()
        left = -1  # bytes that the last file has room for
        for name in (name for name in specs if self.owners[name] == self._peers.rank):
            left -= specs[name].nbytes
            if left < 0 and not (self._adapter and files):
                files.append([])
                left = _FILE_BYTES - specs[name].nbytes
            files[-1].append(name)
        ranks: list[list[list[str]]] = self._peers.exchange(files)
        before = sum(map(len, ranks[: self._peers.rank]))
        count = sum(map(len, ranks))
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        names = names if count > 1 else [ADAPTER if self._adapter else WEIGHTS]
        self._files = dict(zip(names[before:], files, strict=False))
        if self._peers.main and count > 1:
            inside = itertools.chain(*ranks)
            index = {name: file for file, some in zip(names, inside, strict=True) for name in some}
            self._index = json.dumps({"metadata": {}, "weight_map": index})

    def _idle(self) -> bool:
        return not self._busy and (self._held or not self._updates)

    def _add(self, weights: Iterable[Held], sync: int, first: bool) -> None:
        started = time.perf_counter()
        created_at = time.time()
        names = list[str]()
        by_name = dict[str, list[Patch]]()
        # Compare without the lock: the comparison waits until the GPU has finished all work queued before.
        # `own` searches this rank's blocks of its own tensors; `others`, its blocks of other ranks' tensors.
        own = self.mirror.search()
        others = self._shards.mirror.search()
        for held in weights:
            self.require_same(held.name, held.shape)
            if held.dtype != self.dtypes[held.name]:
                raise errors.CodecError(
                    f"{held.name} came as {self.dtypes[held.name]} and now comes as {held.dtype}: publish it"
                    " in the same dtype each time"
                )
            self._require_finite(held)
            names.append(held.name)
            if self.owners[held.name] == self._peers.rank:
                if block := held.own_block(owner=True):
                    own.add(held.part(block))
            elif first:  # there is nothing to compare with yet: the owner compares the whole tensor
                self._shards.begin(held)
            elif part := self._shards.part(held):
                others.add(part)
        found = own.found()
        sent = others.found()
        self._names = self._names or set(names)
        if missing := self._names.difference(names):
            raise errors.CodecError(f"parameter {min(missing)} was not published: publish every parameter")
        remote = self._peers.all_to_all(self._shards.keep(sent), self.owners, self.shapes)
        for patch in filter(lambda patch: patch.index.size, (*found.patches, *remote)):
            by_name.setdefault(patch.name, []).append(patch)
        patches = [patch for name in names for patch in union(by_name.get(name, ()))]
        with self._changed:
            self.mirror.keep(found)
            self.mirror.take(remote)
            diff_s = time.perf_counter() - started
            last = self._updates[-1] if self._updates else None
            # Merge nothing into a pinned sync that is not in the bucket yet.
            merges = last is not None and (last.digest != self._pinned[0] or self._pinned[1] is not None)
            # A sync without changes has the pinned one's digest, so any that wait after it may be merged.
            merges = merges or (len(self._updates) > 1 and self._updates[-2].digest == self._pinned[0])
            # All ranks merge if rank 0 does, and use rank 0's `sync`, because TRL counts only there. The lock
            # is held, so that the background thread does not take `last` meanwhile.
            answers = self._peers.exchange((self.mirror.digest, merges, sync))
            self.digest = to_hex(sum(digest for digest, *_ in answers))
            if first:
                self._require_not_refused()
            _, merges, sync = answers[0]
            own_digest = to_hex(self.mirror.digest)
            new = PendingUpdate(patches, self.digest, own_digest, sync, created_at, diff_s)
            if self.undo_log:
                self.undo_log.add(sync, patches)
            if merges:
                new = self._updates.pop().then(new)
            self._updates.append(new)
            self._held = self.repeated.holds_back(sync, new.digest)
            self._changed.notify_all()

    def _publish_first(self, weights: Iterable[Held], sync: int) -> None:
        """Publish a version as an anchor from the weights of all ranks.

        The run has no version, or its newest version is damaged. In the second case, all later syncs must be
        published, even those that repeat published syncs. So no sync is held back from now on.
        """
        started = time.perf_counter()
        created_at = time.time()
        self.repeated.published = {}
        for held in weights:
            self.shapes[held.name] = held.shape
            self.dtypes[held.name] = held.dtype
            self._require_finite(held)
            if self.owns(held.name, held.shape):
                self.mirror.add(held.name, held.tensor, held.dtype)
                self.mirror.require_finite(held.name, self.mirror.bits(held.name))
            else:
                self._shards.begin(held)
        self._names = set(self.shapes)
        self._publish_whole(sync, started, created_at)

    def _publish_whole(self, sync: int, started: float, created_at: float) -> None:
        """Publish a version as an anchor: the mirrored tensors, and those that are not trained."""
        if not self.shapes:
            raise errors.CodecError("no parameter was handed over: publish `model.named_parameters()`")
        if self._untrained:
            self._spread(self._untrained(self.specs, self.mirror.shapes, self.mirror.bits))
        else:
            self._spread(())  # all ranks must call this, to receive what rank 0 sends
        self._lay_out()
        self.digest = to_hex(sum(self._peers.exchange(self.mirror.digest)))
        self._require_not_refused()
        own = to_hex(self.mirror.digest)
        base = PendingUpdate([], self.digest, own, sync, created_at, time.perf_counter() - started)
        version = 0 if self.version is None else self.version + 1
        writer = self._writer

        def put() -> list[FileRef]:
            return writer.put_weights(version, consumed(self._write(version, self.shortcuts.folder)))

        files = self._copied()
        if files is None:
            files = self._until_stored(version, put, put)
        counts = self._reports.counts()
        stored: list[tuple[list[FileRef] | None, Counts]] = self._peers.exchange((files, counts))
        parts = [part for part, _ in stored if part is not None]
        manifest = None
        if isinstance(writer, RunWriter) and len(parts) == len(stored):
            anchor = AnchorRef(version=version, files=tuple(itertools.chain(*parts)))
            commit = functools.partial(self._commit, writer, base, (), anchor)
            if manifest := self._until_stored(version, commit, writer.confirm):
                self._report(manifest, base, 0.0, [counts for _, counts in stored[1:]])
        newest: Manifest | None = self._peers.exchange(manifest)[0]
        if newest is None:
            raise errors.ConfigError(f"this Publisher was closed before version {version} was in the bucket")
        writer.newest = newest
        self.shortcuts.restart(version, own, self.mirror.shapes)

    def _copied(self) -> list[FileRef] | None:
        """Let the Hub copy the base's files, if they are version 0. Return the files of the anchor that this
        rank has to name; None if the ranks must upload the anchor."""
        copy = self._hub_copy
        if self.version is not None or not self._peers.exchange(copy and copy.may_fit(self.specs))[0]:
            return None
        own = self.mirror.shapes
        sent = {} if self._peers.main else {name: fingerprint(self.mirror.bits(name)) for name in own}
        others = {name: found for rank in self._peers.exchange(sent) for name, found in rank.items()}
        files: list[FileRef] | None = []
        if copy:
            store = functools.partial(copy.copy, own, self.mirror.bits, others)
            files = self._until_stored(0, store, store)
        return files if self._peers.exchange(bool(files))[0] else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (self._updates and not self._held and not self._failure)
                )
                # Rank 0 takes its update here; the other ranks do so below, after they have met rank 0. In
                # between, no rank merges a sync into this update, because rank 0 decides that (see `_add`).
                job = self._take() if self._peers.main and not self._closed else None
                self._busy = True
                self._reported = False
            try:
                with self._thread_peers.fail_together():
                    met = self._thread_peers.exchange((self._closed, self.shortcuts.stored()))
                    if any(closed for closed, _ in met):
                        return
                    if isinstance(self._writer, RunWriter):
                        self._writer.collect([stored for _, stored in met])
                    with self._changed:
                        job = job or self._take()
                    self._publish(job)
            except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
                self._failure = self._failure or error
                if self._closed:
                    return
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take(self) -> PendingUpdate:
        """Take the oldest pending update, to publish it. The caller holds the lock."""
        job = self._updates.pop(0)
        self.shortcuts.begin((self.version or 0) + 1, job.own, job.patches)
        return job

    def _publish(self, job: PendingUpdate) -> None:
        version = (self.version or 0) + 1
        started = time.perf_counter()
        old = functools.partial(self._bits, version=version - 1)
        data = codec.encode(job.patches, old, base=version - 1, version=version, encoding=self._encoding)
        encode_s = time.perf_counter() - started
        changed = sum(p.index.size for p in job.patches)
        put = functools.partial(self._writer.put_delta, version, data, changed)
        writer = self._writer
        some = changed or self._peers.main  # only rank 0 stores an empty part
        part = self._until_stored(version, put, put) if some else None
        lacks = bool(some) and part is None  # this outbox was closed before its part was stored
        counts = self._reports.counts()
        stored = self._thread_peers.exchange((part, lacks, self._writer.receipts, counts))
        news: tuple[Manifest, bool] | None = None
        if isinstance(writer, RunWriter) and not any(lacking for _, lacking, *_ in stored):
            delta = [part for part, *_ in stored if part]
            writer.receipts = {key: given for *_, receipts, _ in stored for key, given in receipts.items()}
            commit = functools.partial(self._commit, writer, job, delta, None)
            manifest = self._until_stored(version, commit, writer.confirm)
            if manifest and writer.anchor_is_due():
                writer.ordered = version
            if manifest:
                news = manifest, writer.ordered == version
                self._report(manifest, job, encode_s, [counts for *_, counts in stored[1:]])
        news = self._thread_peers.exchange(news)[0]
        if news:
            self._writer.newest = news[0]
            self.shortcuts.add(Published(news[0], job.own, anchor=news[1]), data)

    def _until_stored(
        self, version: int, attempt: Callable[[], Kind], again: Callable[[], Kind]
    ) -> Kind | None:
        """Call `attempt`; after each `BucketError`, call `again`. Return the result; after `close`, None. The
        caller is the background thread, or the trainer's if a version is published whole."""
        began = time.monotonic()
        warned = -math.inf
        while not (self._closed or self._failure):
            try:
                done = attempt()
                self._trouble = None
                return done
            except errors.BucketError as error:
                if isinstance(error, errors.AccessDeniedError) and not self._trouble:
                    raise  # a store that denies the first try will deny all
                self._trouble = self._trouble or error
                if (late := time.monotonic() - began) >= warned + _REMIND_S:
                    warned = late
                    _log.warning(
                        "version %d has not reached the bucket for %.0f s, and later ones wait: %s;"
                        " trying again",
                        *(version, late, error),
                    )
            attempt = again  # the bucket may have some of the version's objects, so publish the same version
            time.sleep(_RETRY_S)
        return None

    def _write(self, version: int, folder: Path) -> Iterator[Path]:
        """Write this rank's files of a version's checkpoint; yield the path of each once it is written."""
        bits = functools.partial(self._bits, version=version)
        for file, names in self._files.items():
            write_bits({name: self.shapes[name] for name in names}, bits, folder / file, self.dtypes)
            yield folder / file
        if self._index:
            (folder / INDEX).write_text(self._index)
            yield folder / INDEX

    def _bits(self, name: str, version: int) -> Bits:
        """Return a copy of a tensor's bits at a version after which `shortcuts` has all changes."""
        with self._changed:
            bits = self.mirror.bits(name).copy()
            updates = self._updates[::-1]
            spans = self.shortcuts.after(version)[::-1]
        undo(bits, (update.by_name.get(name) for update in updates))
        undo(bits, (span.patch(name) for span in spans))
        return bits

    def _commit(
        self, writer: RunWriter, job: PendingUpdate, delta: Sequence[DeltaRef], anchor: AnchorRef | None
    ) -> Manifest:
        return writer.commit(
            delta,
            anchor,
            digest=job.digest,
            sync=job.sync,
            total=self._words,
            full_bytes=self._full_bytes,
            created_at=job.created_at,
        )

    def _report(
        self, manifest: Manifest, job: PendingUpdate, encode_s: float, others: Sequence[Counts]
    ) -> None:
        """Log a version that is in the bucket, and note it if it is pinned."""
        times = {"handed_over": job.created_at, "diff_s": job.diff_s, "encode_s": encode_s}
        self._reports.version(manifest, others, **times)
        with self._changed:
            self._reported = True
            if manifest.digest == self._pinned[0]:
                self._pinned = manifest.digest, self._pinned[1] or manifest

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
