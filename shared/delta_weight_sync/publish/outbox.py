"""Finds what each sync (a hand-over of weights) changed, and publishes the changes in the background.

Only a version that is published whole is uploaded while the trainer waits. Otherwise the trainer waits for
the diff only: a background thread encodes and uploads, and tries again if the bucket fails.
Meanwhile later syncs are merged into one pending update. At all times

    published bits  +  the update in flight  +  the pending updates  =  mirror

So no change is lost, and the encoder gets the published bits by undoing the updates, without a second copy.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from delta_weight_sync import codec, errors
from delta_weight_sync.checkpoint import write_bits
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.mirror import Mirror, Place
from delta_weight_sync.publish.sharding import Weights, own_parts, union
from delta_weight_sync.publish.shortcuts import Shortcuts, undone
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.records import AnchorRef, DeltaRef, Manifest
from delta_weight_sync.runlog import RunLogWriter, SyncEvent

Untrained = Callable[[Mapping[str, tuple[int, ...]], Callable[[str], Bits]], Iterable[tuple[str, Bits]]]
_RETRY_S = 2.0
_REMIND_S = 60.0  # between two warnings that a version has not reached the bucket
_log = logging.getLogger("delta_weight_sync")


class RepeatedSyncs:
    """The syncs that a trainer repeats: the bucket has them, so they are not published again."""

    def __init__(self, published: Mapping[int, str]) -> None:
        """`published`: sync -> digest, for each version that an exact repetition produces again."""
        self._published = published
        self.newest = min(published, default=0)  # the newest sync that was repeated exactly

    def holds_back(self, sync: int, digest: str) -> bool:
        """Whether the bucket has this sync, perhaps merged into a later sync. False once a sync differs."""
        if sync > max(self._published, default=-1) or self._published.get(sync, digest) != digest:
            self._published = {}
            return False
        if sync in self._published:
            self.newest = sync
        return True


class UndoLog:
    """What the newest syncs changed. It can restore each of these syncs in another copy of the model.

    Moving a copy from one sync to another writes only what differs, about one weight in a hundred per sync.
    Only the trainer's thread may use it.

    Args:
        sync: The sync that the log begins with.
        keep: Number of syncs that can be undone.

    Attributes:
        syncs: The syncs whose weights can be restored, oldest first.
    """

    def __init__(self, sync: int, keep: int) -> None:
        self.syncs = [sync]
        # The changes from each of `syncs` to the next: name, positions (int32 or int64) and ulps (int16).
        self._steps: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = []
        self._keep = keep

    def add(self, sync: int, patches: Iterable[Patch]) -> None:
        """Append the next sync and what it changed."""
        step = []
        for patch in patches:
            small = patch.numel <= np.iinfo(np.int32).max
            positions = torch.from_numpy(patch.index.astype(np.int32 if small else np.int64))
            step.append((patch.name, positions, torch.from_numpy(patch.ulps.view(np.int16).copy())))
        self._steps.append(step)
        self.syncs.append(sync)
        if len(self._steps) > self._keep:
            del self._steps[0], self.syncs[0]

    def roll(self, weights: Mapping[str, torch.Tensor], start: int, end: int) -> int:
        """Move weights from sync `start` to sync `end`, in place.

        Args:
            weights: Contiguous tensors by published name, on any device; bf16, or float32 with bf16 values.
            start: The sync that the weights are at.
            end: The sync to restore.

        Returns:
            The number of elements written.

        Raises:
            UndoLogError: The log does not reach to `start` or `end`. Nothing is written.
        """
        for sync in {start, end}.difference(self.syncs):
            raise errors.UndoLogError(
                f"the undo log holds syncs {self.syncs[0]} to {self.syncs[-1]}, not {sync};"
                " call `keep_undo_log` with a larger number"
            )
        first, last = self.syncs.index(start), self.syncs.index(end)
        steps = self._steps[first:last] if first <= last else self._steps[last:first][::-1]
        changes = [change for step in steps for change in step]
        for name, positions, ulps in changes:
            bits, sign = bf16_bits(weights[name]), -1 if first > last else 1
            bits.index_add_(0, positions.to(bits.device), ulps.to(bits.device), alpha=sign)
        return sum(len(positions) for _, positions, _ in changes)


def bf16_bits(weights: torch.Tensor) -> torch.Tensor:
    """The bf16 bits of a tensor, as an int16 [n] view of its own memory.

    Raises `ValueError` for any dtype but float32 and bfloat16.
    """
    if weights.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{weights.dtype} weights cannot be moved to another sync: use float32 or bfloat16")
    stride = weights.element_size() // 2  # the bf16 bits are the last two bytes of each weight
    return weights.detach().view(-1).view(torch.int16)[stride - 1 :: stride]


@dataclasses.dataclass(frozen=True)
class PendingUpdate:
    """What one version will hold: the patches since the version before, and the digest that they lead to."""

    patches: list[Patch]
    digest: str
    sync: int
    created_at: float  # unix seconds
    diff_s: float

    @functools.cached_property
    def by_name(self) -> dict[str, Patch]:
        """The patch of each changed tensor."""
        return {patch.name: patch for patch in self.patches}

    def then(self, later: PendingUpdate) -> PendingUpdate:
        """Both updates as one."""
        merged = codec.merge(self.patches, later.patches)
        return dataclasses.replace(later, patches=merged, diff_s=self.diff_s + later.diff_s)


class Outbox:
    """The publishing half of the main rank. One thread, the trainer's, calls `publish`.

    `untrained` gets the shapes and bits of the first sync's tensors. It returns the model's other tensors.
    """

    def __init__(
        self,
        writer: RunWriter,
        log: RunLogWriter,
        *,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        untrained: Untrained | None = None,
        keep: Keep | None = None,
        finite: bool = True,
    ) -> None:
        self._writer, self._log, self._encoding, self._untrained = writer, log, encoding, untrained
        self.mirror = Mirror(mirror, finite=finite)  # bits of the newest sync
        self.repeated = RepeatedSyncs({})  # syncs that a resumed trainer repeats and that are held back
        self.undo_log: UndoLog | None = None  # gets the changes of every sync
        self._names: set[str] = set()  # tensors of every sync
        self.shortcuts = Shortcuts(writer, encoding, keep)
        try:
            self._resume()
        except BaseException:
            self.shortcuts.close()
            raise
        self._anchor = writer.newest.anchor.version if writer.newest else -1  # newest anchor in the log
        self._sent = 0  # bytes of all uploads up to the newest version
        self._encoded = b""  # the delta file of the version that is being published
        self._updates: list[PendingUpdate] = []  # oldest first; merged into one, unless `pin` was called
        self._held = False  # the newest sync is held back, because the bucket has it
        self._pinned: tuple[str, Manifest | None] = "", None  # digest, and its version once it is published
        self._busy, self._closed = False, False
        self._failure: BaseException | None = None
        self._trouble: errors.BucketError | None = None  # why the version in flight is not in the bucket yet
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The newest version in the bucket."""
        return self._writer.newest.version if self._writer.newest else None

    def publish(self, weights: Weights, sync: int, remote_patches: Callable[[], list[Patch]] = list) -> None:
        """Like `Publisher.publish`, for this rank's part. `remote_patches` returns other ranks' changes."""
        self._raise_failure()
        try:
            if self.mirror:
                self._add(weights, sync, remote_patches)
            else:
                self._publish_base(weights, sync)
        except BaseException as error:
            self._failure = error  # the mirror may hold changes that no update has: publish nothing more
            raise

    def flush(self, timeout_s: float = 600.0) -> Manifest:
        """Wait until every sync is published; returns the newest manifest.

        Raises `TimeoutError`, or the error that stopped the publisher.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: self._failure or self._idle(), timeout_s)
        self._raise_failure()
        if not idle or self._writer.newest is None:
            why = self._trouble or "the link is slow"
            raise TimeoutError(f"the last version is not in the bucket after {timeout_s:.0f} s: {why}")
        return self._writer.newest

    def close(self) -> None:
        """Stop the background thread; what was not flushed stays unpublished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.shortcuts.close()

    def pin(self) -> bool:
        """Publish the last sync as a version of its own. False if it is held back, see `RepeatedSyncs`."""
        with self._changed:
            digest, newest = to_hex(self.mirror.digest), self._writer.newest
            there = newest and newest.digest == digest and self._idle()
            if self._held and not there:
                return False
            self._pinned = digest, newest if there else None
            return True

    def pinned(self) -> Manifest | None:
        """Wait for the version of the last `pin`; None if it will not be published."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._failure or self._pinned[1])
            return self._pinned[1]

    def _resume(self) -> None:
        """Start from the newest version. If it is damaged, the next sync publishes the whole model."""
        if self._writer.newest is None:
            return
        try:
            published = self._writer.reader.checkout(self._writer.newest, self.shortcuts.folder)
        except (errors.ProtocolError, errors.CodecError, errors.ObjectMissingError, SafetensorError) as error:
            _log.warning("the newest version cannot be rebuilt, so the next one is an anchor: %s", error)
            return
        for name, bits in published.items():
            self.mirror.add(name, torch.from_numpy(bits).view(torch.bfloat16))
        self.shortcuts.restart(self._writer.newest.version)

    def _idle(self) -> bool:
        return not self._busy and (self._held or not self._updates)

    def _add(self, weights: Weights, sync: int, remote_patches: Callable[[], list[Patch]]) -> None:
        started, created_at = time.perf_counter(), time.time()
        by_name: dict[str, list[Patch]] = {}
        # Do this without the lock: on a GPU the diff first waits for all work that is queued there.
        found = self.mirror.find(own_parts(weights, self.mirror, by_name))
        self._names = self._names or set(by_name)
        if missing := self._names - by_name.keys():
            raise errors.CodecError(f"parameter {min(missing)} was not published: publish every parameter")
        remote = remote_patches()
        for patch in (*found.patches, *remote):
            by_name[patch.name].append(patch)
        patches = [patch for parts in by_name.values() for patch in union(parts)]
        with self._changed:
            self.mirror.keep(found)
            self.mirror.take(remote)
            diff_s = time.perf_counter() - started
            new = PendingUpdate(patches, to_hex(self.mirror.digest), sync, created_at, diff_s)
            if self.undo_log:
                self.undo_log.add(sync, patches)
            if self._updates and self._updates[-1].digest != self._pinned[0]:
                new = self._updates.pop().then(new)
            self._updates.append(new)
            self._held = self.repeated.holds_back(sync, new.digest)
            if self._held and not any(patch.index.size for patch in new.patches):
                self._updates.clear()  # no net change: the mirror equals the newest version
            self._changed.notify_all()

    def _publish_base(self, weights: Weights, sync: int) -> None:
        started, created_at = time.perf_counter(), time.time()
        for name, tensor in weights:
            self.mirror.add(name, tensor)
            self.mirror.require_finite(name, self.mirror.bits(name))
        self._names = set(self.mirror.shapes)
        untrained = self._untrained(self.mirror.shapes, self.mirror.bits) if self._untrained else ()
        for name, bits in untrained:
            self.mirror.add(name, torch.from_numpy(bits).view(torch.bfloat16))
        base = PendingUpdate([], to_hex(self.mirror.digest), sync, created_at, time.perf_counter() - started)
        version = 0 if self.version is None else self.version + 1
        self._write(self.shortcuts.path)
        anchor = self._writer.put_anchor(version, self.shortcuts.path)
        self._report(self._commit(base, None, anchor), base, 0.0)
        self.shortcuts.restart(version)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (self._updates and not self._held and not self._failure)
                )
                if self._closed:
                    return
                self._busy, job = True, self._updates.pop(0)
            try:
                self._publish(job)
            except Exception as error:  # noqa: BLE001 - raised again in the trainer's thread
                self._failure = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _publish(self, job: PendingUpdate) -> None:
        version, started = (self.version or 0) + 1, time.perf_counter()
        old = functools.partial(self._before, job)
        self._encoded = codec.encode(
            job.patches, old, base=version - 1, version=version, encoding=self._encoding
        )
        encode_s, began, warned = time.perf_counter() - started, time.monotonic(), -math.inf
        delta = self._writer.put_delta(version, self._encoded, sum(p.index.size for p in job.patches))
        attempt: Callable[[], Manifest] = functools.partial(self._commit, job, delta, None)
        while not self._closed:
            try:
                self._report(attempt(), job, encode_s)
                break
            except errors.BucketError as error:
                if isinstance(error, errors.AccessDeniedError) and not self._trouble:
                    raise  # a first try that is denied will be denied again
                self._trouble = self._trouble or error
                if (late := time.monotonic() - began) >= warned + _REMIND_S:
                    warned = late
                    _log.warning(
                        "version %d has not reached the bucket for %.0f s, and later ones wait: %s;"
                        " trying again",
                        *(version, late, error),
                    )
            attempt = self._writer.confirm  # parts may be in the bucket, so publish the same version
            time.sleep(_RETRY_S)
        self._trouble = None

    def _write(self, path: Path) -> None:
        """Write the published weights as a file. A concurrent sync waits for one tensor at most."""
        write_bits(self.mirror.shapes, functools.partial(self._before, None), path)

    def _before(self, job: PendingUpdate | None, name: str) -> Bits:
        """A tensor's bits without the pending updates, and without `job`."""
        with self._changed:
            updates = filter(None, (*reversed(self._updates), job))
            return undone(self.mirror.bits(name), (update.by_name.get(name) for update in updates))

    def _commit(self, job: PendingUpdate, delta: DeltaRef | None, anchor: AnchorRef | None) -> Manifest:
        total, at = sum(map(math.prod, self.mirror.shapes.values())), job.created_at
        return self._writer.commit(
            delta, anchor, digest=job.digest, sync=job.sync, total=total, created_at=at
        )

    def _report(self, manifest: Manifest, job: PendingUpdate, encode_s: float) -> None:
        """Log a version that is in the bucket, and hand it to `shortcuts`."""
        anchor_bytes = manifest.anchor.files[0].size if manifest.anchor.version != self._anchor else 0
        sent, self._sent = self._sent, self._writer.bucket.sent
        self._anchor = manifest.anchor.version
        self._log.append(
            SyncEvent(
                **manifest.model_dump(include={"version", "sync", "full_bytes", "changed", "total"}),
                t=time.time(),
                payload_bytes=manifest.deltas[-1].size if manifest.deltas else anchor_bytes,
                anchor_bytes=anchor_bytes,
                sent_bytes=self._sent - sent,
                diff_s=job.diff_s,
                encode_s=encode_s,
                publish_s=time.time() - job.created_at,
            )
        )
        if manifest.deltas:
            self.shortcuts.add(manifest, job.patches, self._encoded, self._write)
        with self._changed:
            if manifest.digest == self._pinned[0]:
                self._pinned = manifest.digest, self._pinned[1] or manifest

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
