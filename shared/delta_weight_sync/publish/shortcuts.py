"""Makes shortcuts to the newest version, in the background: jumps over several versions, and anchors.

A thread applies each published patch to a copy of the checkpoint on this machine's disk, so memory never
holds a second model. An anchor is an upload of that copy. A jump over 8 versions is an exact merge of their
patches, which stay in memory. For a jump over 64 versions, or over 8 if the patches exceed a budget, a second
file keeps the weights of the version where the jump begins. The jump is the difference of the two files.

The next manifest names the uploaded shortcuts. If the trainer crashes before, `keep` or `gc` deletes them.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.errors import BucketError, ProtocolError
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import apply_delta, require_digest
from delta_weight_sync.records import STRIDES, Manifest
from delta_weight_sync.scratch import Scratch

_BEHIND: Final = 16  # while more versions than this wait here, it makes no jumps and anchors
_RESTART_EVERY: Final = 64  # versions between two attempts to begin again, for example after a full disk
_CLOSING_S: Final = 5.0
_SMALLEST: Final = 1 << 24  # bytes of memory that patches may always take
_SHARE: Final = 3  # patches may take up to 1 / _SHARE of the bf16 model, if that is more than _SMALLEST
_log = logging.getLogger("delta_weight_sync")


class _Start:
    """Where a stride's next jump begins: that version's weights in a file, or the merged patches since it."""

    def __init__(self, stride: int, path: Path) -> None:
        self.stride, self.version = stride, -1
        self._path, self._in_memory = path, stride == min(STRIDES)
        self._patches: list[Patch] | None = None

    def begin(self, version: int, newest: Path) -> None:
        """Begin at `version`, whose weights are in the file `newest`."""
        self.version, self._patches = version, [] if self._in_memory else None
        if not self._in_memory:
            shutil.copyfile(newest, self._path)

    def add(self, patches: Sequence[Patch] | None, newest: Path, budget: int) -> None:
        """Add a version's patches (None if not in memory). Call this before they are applied to `newest`."""
        if (earlier := self._patches) is None:
            return
        if patches is not None:
            self._patches = codec.merge(earlier, patches)
            if nbytes(self._patches) <= budget:
                return
        shutil.copyfile(newest, self._path)
        bits, self._patches = map_bits(self._path, "r+"), None
        for patch in earlier:
            codec.apply(codec.inverse(patch), bits[patch.name])

    def jump(self, newest: dict[str, Bits]) -> tuple[Iterator[Patch], Callable[[str], Bits]]:
        """The patches from `version` to `newest`, in `newest`'s order, and the bits at `version` by name."""
        if self._patches is None:
            old = map_bits(self._path)
            return (codec.diff(name, old[name], new) for name, new in newest.items()), old.__getitem__
        patches = {patch.name: patch for patch in self._patches}
        found = (patches[name] for name in newest if name in patches)
        return found, lambda name: undone(newest[name], [patches.get(name)])


class Shortcuts:
    """Makes jumps and anchors. The publishing thread calls `restart` and `add`, in the order of versions."""

    def __init__(self, writer: RunWriter, encoding: Encoding, keep: Keep | None) -> None:
        """`keep`: how much of the run stays in the bucket; None for everything."""
        self._writer, self._encoding = writer, encoding
        self._pruner = Pruner(writer.reader, keep) if keep else None
        self._scratch = Scratch()
        self.folder = self._scratch.path
        self.path = self.folder / WEIGHTS  # the copy; write the newest version here before `restart`
        self._version = -1
        self._starts = [_Start(stride, self.folder / f"from-{stride}") for stride in STRIDES]
        self._published: deque[tuple[Manifest, Sequence[Patch] | Path]] = deque()
        self._changed = threading.Condition()
        self._busy, self._closed, self._said = False, False, ""
        self._stayed = self._came = 0  # bytes that the last pruning left; bytes added between the last two
        self.lost = True  # the files hold no known version; `restart` is needed
        self._thread = threading.Thread(target=self._run, name="shortcuts", daemon=True)
        self._thread.start()

    def restart(self, version: int) -> None:
        """Begin at the newest version, whose weights are at `path`."""
        self._version = version
        for start in self._starts:
            start.version = -1
        self.lost = False

    def add(
        self, manifest: Manifest, patches: Sequence[Patch], delta: bytes, write: Callable[[Path], object]
    ) -> None:
        """Add a published version: its patches, its delta file, and a function that writes its weights."""
        if self.lost and manifest.version % _RESTART_EVERY == 0 and self.idle(0):
            try:
                write(self.path)
            except OSError as error:
                self._complain(error)
            else:
                self.restart(manifest.version)
            return
        with self._changed:
            if self.lost or self._closed:
                return
            change: Sequence[Patch] | Path = patches
            waiting = sum(nbytes(held) for _, held in self._published if not isinstance(held, Path))
            if waiting + nbytes(patches) > _budget(manifest):
                change = self.folder / f"{manifest.version:08d}.delta"
                try:
                    change.write_bytes(delta)
                except OSError as error:
                    self._lose(error)
                    return
            self._published.append((manifest, change))
            self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        """Wait until all added versions are done. Returns False if that takes longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._published), timeout_s)

    def close(self) -> None:
        """Stop, and drop unfinished shortcuts, because no later manifest of this writer would name them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)  # a longer upload ends with this process
        self._scratch.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._published)
                if self._closed:
                    return
                self._busy = True
                manifest, change = self._published.popleft()
            try:
                self._follow(manifest, change)
            except BucketError as error:  # the next version tries again
                self._complain(error)
            except Exception as error:  # noqa: BLE001 - the run continues without shortcuts
                with self._changed:
                    self._lose(error)
            del change  # frees its patches
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _lose(self, error: Exception) -> None:
        self.lost = True
        self._published.clear()
        self._complain(error)

    def _complain(self, error: Exception) -> None:
        if str(error) != self._said and not self._closed:
            _log.warning("no jumps and anchors for now: %s", error)
        self._said = str(error)

    def _follow(self, manifest: Manifest, change: Sequence[Patch] | Path) -> None:
        patches = None if isinstance(change, Path) else change
        for start in self._starts:
            if start.version < 0:
                start.begin(self._version, self.path)
            start.add(patches, self.path, _budget(manifest))
        bits = map_bits(self.path, "r+")
        for patch in patches or ():
            codec.apply(patch, bits[patch.name])
        if isinstance(change, Path):
            apply_delta(bits, change)
            change.unlink()
        self._version = manifest.version
        if len(self._published) > _BEHIND:
            return
        due = [start for start in self._starts if self._version - start.version >= start.stride]
        anchor = self._writer.anchor_is_due()
        if due or anchor:
            require_digest(bits, manifest)
            for start in due:
                self._jump(start, bits)
                start.begin(self._version, self.path)
            if anchor:
                self._writer.add_anchor(self._version, self.path)
            self._prune(manifest)

    def _jump(self, start: _Start, newest: dict[str, Bits]) -> None:
        patches, old = start.jump(newest)
        base, version, sizes = start.version, self._version, list[int]()

        def counted() -> Iterator[Patch]:
            for patch in patches:
                if self._closed:
                    raise RuntimeError("the publisher is closing: this jump is dropped")
                sizes.append(patch.index.size)
                yield patch

        data = codec.encode(counted(), old, base=base, version=version, encoding=self._encoding)
        self._writer.add_jump(base, version, data, sum(sizes))

    def _prune(self, newest: Manifest) -> None:
        """Prune. Leave room for an anchor and twice the bytes added between the last two prunings."""
        if self._pruner is None:
            return
        room = newest.full_bytes + 2 * self._came
        try:
            survey = self._pruner.survey(self._writer.pending_keys(), room)
        except ProtocolError as error:  # a damaged manifest does not say which files it needs
            _log.warning("deleted nothing of the run, because a manifest is damaged: %s", error)
            return
        if survey:
            self._came = survey.kept + survey.freed - self._stayed if self._stayed else 0
            self._stayed = survey.kept
            prune(self._writer.bucket, survey)


def nbytes(patches: Iterable[Patch]) -> int:
    """Bytes of memory that patches take."""
    return sum(patch.index.nbytes + patch.ulps.nbytes for patch in patches)


def undone(bits: Bits, patches: Iterable[Patch | None]) -> Bits:
    """A copy of a tensor's `bits` with `patches` undone, given newest first. None stands for no change."""
    bits = bits.copy()
    for patch in filter(None, patches):
        codec.apply(codec.inverse(patch), bits)
    return bits


def _budget(manifest: Manifest) -> int:
    return max(_SMALLEST, manifest.full_bytes // _SHARE)
