"""Shortcuts to the newest version, made beside the publisher: jumps over several versions, and anchors.

A thread follows what was published on copies of the checkpoint on this machine's disk: one at the newest
version, and one for each stride, at the version where its next jump begins. A jump is the difference of two
copies, tensor by tensor on the files' own pages; an anchor is the first copy as it is. So neither the trainer
nor the next version waits for one, and no second model is held in memory. A later manifest names what is in
the bucket by then; after a crash nothing names it, and `pruning` finds it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.history import apply_delta, require_digest
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.pruning import Keep, Pruner, prune
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import BucketError
from delta_weight_sync.ways import STRIDES

_BEHIND: Final = 16  # published versions that wait here before jumps are left out
_ANEW_EVERY: Final = 64  # versions, after the disk was full
_CLOSING_S: Final = 5.0
_log = logging.getLogger("delta_weight_sync")


class Copy:
    """A checkpoint file that is at some version."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, -1

    def bits(self) -> dict[str, Bits]:
        """Its tensors, on the file's pages."""
        return map_bits(self.path, "r+")

    def take(self, other: Copy) -> None:
        """Become what `other` is."""
        coming = self.path.with_suffix(".coming")
        shutil.copyfile(other.path, coming)
        coming.replace(self.path)
        self.version = other.version


class Shortcuts:
    """`restart` and `add` are called by the thread that publishes, in the order of versions."""

    def __init__(self, writer: RunWriter, encoding: Encoding, keep: Keep | None) -> None:
        """`keep`: what of the run is to stay in the bucket, None for all of it."""
        self._writer, self._encoding = writer, encoding
        self._pruner = Pruner(writer.reader, keep) if keep else None
        self._scratch = tempfile.TemporaryDirectory(prefix="delta-weight-sync-")
        self.folder = Path(self._scratch.name)
        self._newest = Copy(self.folder / WEIGHTS)
        self._starts = {stride: Copy(self.folder / f"from-{stride}") for stride in STRIDES}
        self._published: deque[tuple[Manifest, Path]] = deque()
        self._changed = threading.Condition()
        self._busy, self._closed, self._said = False, False, ""
        self._stayed = self._came = 0  # bytes: after it was pruned, and since then
        self.lost = True  # the copies are at no version: `restart` makes them good
        self._thread = threading.Thread(target=self._run, name="shortcuts", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Where the weights of the newest version belong before `restart`."""
        return self._newest.path

    def restart(self, version: int, write: Callable[[Path], object] | None = None) -> None:
        """Begin at the newest version, whose weights are at `path`, or are written there now."""
        try:
            if write:
                write(self.path)
        except OSError as error:
            self._complain(error)
            return
        self._newest.version = version
        for start in self._starts.values():
            start.version = -1
        self.lost = False

    def add(self, manifest: Manifest, delta: bytes, write: Callable[[Path], object]) -> None:
        """A version was published, whose delta file holds these bytes; `write` writes its weights."""
        if self.lost and manifest.version % _ANEW_EVERY == 0 and self.idle(0):
            self.restart(manifest.version, write)
            return
        path = self.folder / f"{manifest.version:08d}.delta"
        with self._changed:
            if self.lost or self._closed:
                return
            try:
                path.write_bytes(delta)
            except OSError as error:
                self._lose(error)
            else:
                self._published.append((manifest, path))
                self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        """Wait until all that was added is worked up; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._published), timeout_s)

    def close(self) -> None:
        """Stop; what is being made is left, since no manifest of this writer would name it.

        An upload that goes on is not waited for either: it ends with this process.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)
        self._scratch.cleanup()

    def _run(self) -> None:
        while (published := self._next()) is not None:
            try:
                self._follow(*published)
            except _ClosedError:
                return
            except BucketError as error:  # tried again with the next version
                self._complain(error)
            except Exception as error:  # noqa: BLE001 - the run goes on without shortcuts
                with self._changed:
                    self._lose(error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[Manifest, Path] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._published)
            if self._closed:
                return None
            self._busy = True
            return self._published.popleft()

    def _lose(self, error: Exception) -> None:
        self.lost = True
        self._published.clear()
        self._complain(error)

    def _complain(self, error: Exception) -> None:
        if str(error) != self._said and not self._closed:
            _log.warning("no jumps and anchors for now: %s", error)
        self._said = str(error)

    def _follow(self, manifest: Manifest, delta: Path) -> None:
        for start in self._starts.values():
            if start.version < 0:
                start.take(self._newest)
        apply_delta(self._newest.bits(), delta)
        delta.unlink()
        self._newest.version = manifest.version
        if len(self._published) > _BEHIND:
            return
        due = [start for stride, start in self._starts.items() if manifest.version - start.version >= stride]
        anchor = self._writer.anchor_is_due()
        if due or anchor:
            require_digest(self._newest.bits(), manifest)
            self._make(due, anchor)
            self._prune(manifest)

    def _make(self, due: list[Copy], anchor: bool) -> None:
        for start in due:
            self._jump(start)
        if anchor:
            self._writer.offer_anchor(self._newest.version, self._newest.path)

    def _jump(self, start: Copy) -> None:
        changes = [0]
        old = start.bits()
        data = codec.encode(
            self._differences(old, changes),
            old.__getitem__,
            base=start.version,
            version=self._newest.version,
            encoding=self._encoding,
        )
        self._writer.offer_jump(start.version, self._newest.version, data, changes[0])
        start.take(self._newest)

    def _differences(self, old: dict[str, Bits], changes: list[int]) -> Iterator[Patch]:
        """Of the newest version to `old`, tensor by tensor; counts them in `changes`."""
        for name, new in self._newest.bits().items():
            if self._closed:
                raise _ClosedError
            patch = codec.diff(name, old[name], new)
            changes[0] += patch.index.size
            yield patch

    def _prune(self, newest: Manifest) -> None:
        """Leave room until the next time: for an anchor, and twice for what came since the last time."""
        if self._pruner is None:
            return
        room = newest.full_bytes + 2 * self._came
        try:
            survey = self._pruner.survey(self._writer.offered(), room)
        except ProtocolError as error:  # what a damaged manifest needs cannot be told
            _log.warning("nothing of the run is deleted: %s", error)
            return
        if survey:
            self._came = survey.kept + survey.freed - self._stayed if self._stayed else 0
            self._stayed = survey.kept
            prune(self._writer.bucket, survey)


class _ClosedError(Exception):
    """The publisher ends."""
