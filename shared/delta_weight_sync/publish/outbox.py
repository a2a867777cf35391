"""What was handed over and is not in the bucket yet: published in the background, while training goes on.

The trainer's thread only diffs: against `mirror`, the newest bits that were handed over. A background
thread encodes and uploads. While it is busy, further hand-overs are merged into one waiting patch set, so a
slow link skips versions instead of queueing them; a failed upload is merged into the next one. At all times

    published bits  +  the patches in flight  +  the waiting patches  =  mirror

which is why nothing is lost however many syncs or uploads fail, and how the published bits, which the encoder
may need, are had without a second copy of the model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import write_bits
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.pruning import Keep
from delta_weight_sync.publish.base import published_weights
from delta_weight_sync.publish.comparing import Comparison, Rest, nothing
from delta_weight_sync.publish.mirror import Mirror, Place
from delta_weight_sync.publish.pending import PendingUpdate, Waiting, published_bits
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.publish.sharded import Weights
from delta_weight_sync.publish.shortcuts import Shortcuts
from delta_weight_sync.refs import AnchorRef, DeltaRef
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import AccessDenied, BucketError, BucketMissing

_RETRY_S = 2.0
_log = logging.getLogger("delta_weight_sync")


class Outbox:
    """The one process that publishes has it. `publish` is called by one thread, the trainer's."""

    def __init__(
        self,
        writer: RunWriter,
        log: RunLogWriter,
        *,
        encoding: Encoding = "fast",
        mirror: Place = "host",
        rest: Rest = nothing,
        keep: Keep | None = None,
    ) -> None:
        """`encoding`: of deltas, see `delta_weight_sync.codec`; `mirror`: where published bits are kept.

        `rest`: of the shapes that version 0 was handed, the tensors that belong to it besides. `keep`: how
        much of the run stays in the bucket, None for all of it.
        """
        self._writer, self._log, self._encoding = writer, log, encoding
        self.mirror = Mirror(mirror)  # while nothing is handed over, the newest version
        self._comparison = Comparison(self.mirror, rest)
        self.shortcuts = Shortcuts(writer, encoding, keep)
        with contextlib.ExitStack() as stack:
            stack.callback(self.shortcuts.close)
            self._resume()
            stack.pop_all()
        self._anchor = writer.newest.anchor.version if writer.newest else -1  # the newest that is named
        self._encoded = b""  # the delta file of the version that is being published
        self.waiting = Waiting()
        self._pinned: tuple[str, Manifest | None] = "", None  # digest, and its version once it is published
        self._busy, self._closed = False, False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The newest version in the bucket."""
        return self._writer.newest.version if self._writer.newest else None

    def publish(self, weights: Weights, sync: int, remote_patches: Callable[[], list[Patch]] = list) -> None:
        """Hand over the weights: checkpoint name and tensor, any float dtype, cast to bf16 here.

        Of a sharded tensor only the part on this rank is compared; `remote_patches` gives what others found.
        Returns after the diff; the very first version of a run is uploaded before it returns. Raises what
        stopped the publisher, if something did: `FencedError`, `AccessDenied`, `CodecError`.
        """
        self._raise_failure()
        try:
            if self.mirror:
                self._add(weights, sync, remote_patches)
            else:
                self._publish_base(weights, sync)
        except BaseException as error:
            self._failure = error  # the mirror may hold what nobody will publish: nothing may follow
            raise

    def flush(self, timeout_s: float = 600.0) -> Manifest:
        """Wait until everything that was handed over is published; returns the newest manifest."""
        with self._changed:
            idle = self._changed.wait_for(
                lambda: self._failure or not (self._busy or self.waiting), timeout_s
            )
        self._raise_failure()
        if not idle or self._writer.newest is None:
            raise TimeoutError(
                f"the last version is not in the bucket after {timeout_s:.0f} s; is the link up?"
            )
        return self._writer.newest

    def close(self) -> None:
        """Stop the background thread; what was not flushed stays unpublished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.shortcuts.close()

    def _resume(self) -> None:
        """Go on from the run's newest version, if it has one."""
        published = published_weights(self._writer, self.shortcuts.folder)
        for name, bits in published.items():
            self.mirror.add(name, torch.from_numpy(bits).view(torch.bfloat16))
        if published and self.version is not None:
            self.shortcuts.restart(self.version)

    def _add(self, weights: Weights, sync: int, remote_patches: Callable[[], list[Patch]]) -> None:
        started, created_at = time.perf_counter(), time.time()
        # Without the lock, for it waits until the steps that are queued on a GPU are done.
        found, theirs, patches = self._comparison.find(weights, remote_patches)
        with self._changed:
            self.mirror.keep(found)
            self.mirror.take(theirs)
            diff_s = time.perf_counter() - started
            new = PendingUpdate(patches, self.mirror.digest, sync, created_at, diff_s)
            self.waiting.add(new)
            self._changed.notify_all()

    def pin(self) -> bool:
        """What was handed over last is or becomes a version of its own; False if it was held back."""
        with self._changed:
            digest, newest = self.mirror.digest, self._writer.newest
            there = newest and newest.digest == to_hex(digest) and not (self._busy or self.waiting)
            if self.waiting.held and not there:
                return False
            self.waiting.pin(digest)
            self._pinned = to_hex(digest), newest if there else None
            return True

    def pinned(self) -> Manifest | None:
        """Waits for the version of what was pinned last; None if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._failure or self._pinned[1])
            return self._pinned[1]

    def _publish_base(self, weights: Weights, sync: int) -> None:
        started, created_at = time.perf_counter(), time.time()
        self._comparison.begin(weights)
        base = PendingUpdate([], self.mirror.digest, sync, created_at, time.perf_counter() - started)
        version = 0 if self.version is None else self.version + 1
        self._write(self.shortcuts.path)
        self._commit(base, None, self._writer.put_anchor(version, self.shortcuts.path), 0.0)
        self.shortcuts.restart(version)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._attempt(job)
            except Exception as error:  # noqa: BLE001 - raised again in the trainer's thread
                self._failure = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _attempt(self, job: PendingUpdate) -> None:
        try:
            self._publish(job)
        except (AccessDenied, BucketMissing):
            raise  # trying again does not help
        except BucketError as error:
            _log.warning("not published yet: %s; trying again", error)
            self._settle(job)

    def _next(self) -> PendingUpdate | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self.waiting and not self._failure))
            if self._closed:
                return None
            self._busy = True
            return self.waiting.pop()

    def _publish(self, job: PendingUpdate) -> None:
        version = (self.version or 0) + 1
        started = time.perf_counter()
        self._encoded = self._encode(job, version)
        encode_s = time.perf_counter() - started
        delta = self._writer.put_delta(version, self._encoded, sum(p.index.size for p in job.patches))
        self._commit(job, delta, None, encode_s)

    def _encode(self, job: PendingUpdate, version: int) -> bytes:
        published = functools.partial(self._before, job)
        return codec.encode(
            job.patches, published, base=version - 1, version=version, encoding=self._encoding
        )

    def _write(self, path: Path) -> None:
        """What is published, as a file. The trainer may hand over meanwhile: it waits for a tensor's copy."""
        write_bits(self.mirror.shapes, functools.partial(self._before, None), path)

    def _before(self, job: PendingUpdate | None, name: str) -> Bits:
        """A tensor's bits without what waits, and without `job` if it is given."""
        with self._changed:
            return published_bits(self.mirror.bits(name), name, [*self.waiting.newest_first(), job])

    def _settle(self, job: PendingUpdate) -> None:
        """After a failure: finish the version if it was decided; else what it holds is sent with the next."""
        while not self._closed:
            time.sleep(_RETRY_S)
            with contextlib.suppress(BucketError):
                if manifest := self._writer.confirm():
                    self._report(manifest, job, 0.0)
                    return
                with self._changed:
                    self.waiting.put_back(job)
                return

    def _commit(
        self, job: PendingUpdate, delta: DeltaRef | None, anchor: AnchorRef | None, encode_s: float
    ) -> None:
        manifest = self._writer.commit(
            delta,
            anchor,
            digest=to_hex(job.digest),
            sync=job.sync,
            total=self.mirror.total,
            created_at=job.created_at,
        )
        self._report(manifest, job, encode_s)

    def _report(self, manifest: Manifest, job: PendingUpdate, encode_s: float) -> None:
        new = manifest.anchor.version != self._anchor
        self._log.append(job.event(manifest, manifest.anchor.files[0].size if new else 0, encode_s))
        self._anchor = manifest.anchor.version
        if manifest.deltas:
            self.shortcuts.add(manifest, self._encoded, self._write)
        with self._changed:
            if manifest.digest == self._pinned[0]:
                self._pinned = manifest.digest, self._pinned[1] or manifest

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
