"""Makes shortcuts to the newest version, in the background: jumps over several versions, and anchors.

A thread applies each published patch to a copy of the checkpoint on this machine's disk, so memory never
holds a second model. An anchor is an upload of that copy. A jump over 8 versions is an exact merge of their
patches, which stay in memory. For a jump over 64 versions, a second copy keeps the weights of the version
where the jump begins, and the jump is the difference of the two copies. If the patches for a jump over 8
versions exceed a budget, this jump is made in the same way as a jump over 64.

Each rank makes shortcuts of the tensors that it owns. Jumps end at versions that are multiples of 8 or 64,
so ranks that keep up make the same jumps. A manifest names a shortcut once all ranks have stored their parts
of it. If the trainer crashes before that, the option `keep` or the command `gc` deletes the stored parts.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import map_folder
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.errors import BucketError, ProtocolError
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.publish.writer import PartWriter, RunWriter, Stored
from delta_weight_sync.reader import apply_delta, require_digest
from delta_weight_sync.records import STRIDES, FileRef, Manifest
from delta_weight_sync.scratch import Scratch

_BEHIND: Final = 16  # while more versions than this wait, anchors are made, but no jumps
_RESTART_EVERY: Final = 64  # versions between two attempts to begin again, for example after a full disk
_CLOSING_S: Final = 5.0
_SMALLEST: Final = 1 << 24  # bytes of memory that patches may always take
_SHARE: Final = 3  # patches may take up to 1 / _SHARE of the bf16 model, if that is more than _SMALLEST
_log = logging.getLogger("delta_weight_sync")


class _Start:
    """The version where the next jump of one stride (8 or 64) begins. For the jump, this object keeps either
    the version's weights on disk, or the merged patches since the version in memory."""

    def __init__(self, stride: int, path: Path) -> None:
        self.stride, self.version = stride, -1  # -1: call `begin`
        self._path, self._in_memory = path, stride == min(STRIDES)
        self._patches: list[Patch] | None = None

    def begin(self, version: int, newest: Path) -> None:
        """Begin at `version`, whose weights are in the folder `newest`."""
        self.version, self._patches = version, [] if self._in_memory else None
        if not self._in_memory:
            shutil.copytree(newest, self._path, dirs_exist_ok=True)

    def jump_is_due(self, version: int) -> bool:
        """Whether a jump ends at `version`. The first jump spans at least half of `stride` versions. A later
        jump spans `stride` versions, or more after a backlog."""
        return version % self.stride == 0 and version - self.version >= self.stride // 2

    def add(self, patches: Sequence[Patch] | None, newest: Path, budget: int) -> None:
        """Add the next version's patches (None: they are in a file). `newest` must not have them yet."""
        if (earlier := self._patches) is None:
            return
        if patches is not None:
            self._patches = codec.merge(earlier, patches)
            if nbytes(self._patches) <= budget:
                return
        # Write the start's weights to disk: copy `newest`, which has only the earlier patches, and undo them.
        shutil.copytree(newest, self._path, dirs_exist_ok=True)
        bits, self._patches = map_folder(self._path, "r+"), None
        for patch in earlier:
            codec.apply(codec.inverse(patch), bits[patch.name])

    def jump(self, newest: dict[str, Bits]) -> tuple[Iterator[Patch], Callable[[str], Bits]]:
        """Return the patches from `version` to `newest`, and a function: name -> bits at `version`."""
        if self._patches is None:
            old = map_folder(self._path)
            return (codec.diff(name, old[name], new) for name, new in newest.items()), old.__getitem__
        patches = {patch.name: patch for patch in self._patches}
        found = (patches[name] for name in newest if name in patches)
        return found, lambda name: undone(newest[name], [patches.get(name)])


class Published(NamedTuple):
    """A version of this rank's tensors. If `patches` is None, the patches are in `file`."""

    manifest: Manifest
    patches: Sequence[Patch] | None
    digest: str  # of this rank's tensors
    anchor: bool  # whether to make an anchor of this version
    file: Path = Path()


class Shortcuts:
    """Makes jumps and anchors. The outbox publishes versions; it calls `restart` and `add` in their order."""

    def __init__(self, writer: PartWriter, encoding: Encoding, keep: Keep | None) -> None:
        """`keep`: how much of the run stays in the bucket; None for everything. Only rank 0 deletes."""
        self._writer, self._encoding = writer, encoding
        self._pruner = Pruner(writer.reader, keep) if keep and isinstance(writer, RunWriter) else None
        self._scratch = Scratch()
        self.folder = self._scratch.path
        self.path = self.folder / "newest"  # the copy: write the newest version here before `restart`
        self.path.mkdir()
        self._version = -1
        self._starts = [_Start(stride, self.folder / f"from-{stride}") for stride in STRIDES]
        self._published: deque[Published] = deque()
        self._anchor: list[FileRef] | None = None  # files of the anchor that `_make` has just stored
        self._stored: list[Stored] = []  # what `stored` returns next
        self._unnamed: dict[str, int] = {}  # key of a stored file that no manifest names yet -> version
        self._unsent: list[tuple[int, int, bytes, int]] = []  # jumps to upload, as `_jump` returns them
        self._changed = threading.Condition()
        self._busy, self._closed, self._warned = False, False, ""
        self._stayed = 0  # bytes that the last pruning left
        self._came = 0  # bytes that were added between the last two prunings
        self.lost = True  # whether the copy holds no known version: call `restart`
        self._thread = threading.Thread(target=self._run, name="shortcuts", daemon=True)
        self._thread.start()

    def restart(self, version: int) -> None:
        """Begin at the newest version, whose weights are in `path`."""
        self._version = version
        for start in self._starts:
            start.version = -1
        self.lost, self._warned = False, ""

    def stored(self) -> list[Stored]:
        """Return the parts that this rank has stored since the last call."""
        with self._changed:
            found, self._stored = self._stored, []
            return found

    def add(self, version: Published, delta: bytes, write: Callable[[Path], object]) -> None:
        """Add a published version and the bytes of its delta. `write` writes its weights to a folder."""
        manifest = version.manifest
        if version.anchor and self.lost:  # tell rank 0 not to wait for this rank's part of the anchor
            self._stored.append(Stored(None, manifest.version, None))
        if self.lost and manifest.version % _RESTART_EVERY == 0 and self.idle(0):
            try:
                for left in self.folder.glob("*.delta"):
                    left.unlink()
                write(self.path)
                self.restart(manifest.version)
            except OSError as error:
                self._complain(error)
            return
        with self._changed:
            if self.lost or self._closed:
                return
            waiting = sum(nbytes(one.patches) for one in (*self._published, version) if one.patches)
            if waiting > _budget(manifest):
                version = version._replace(patches=None, file=self.folder / f"{manifest.version:08d}.delta")
                try:
                    version.file.write_bytes(delta)
                except OSError as error:
                    self._published.append(version)
                    self._lose(error)
                    return
            self._published.append(version)
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
        self._thread.join(_CLOSING_S)  # an upload that takes longer ends with this process
        self._scratch.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._published)
                if self._closed:
                    return
                self._busy = True
                version = self._published.popleft()
            self._anchor = None
            try:
                self._follow(version)
            except BucketError as error:  # the next version tries again
                self._complain(error)
            except Exception as error:  # noqa: BLE001 - the run continues without shortcuts
                with self._changed:
                    self._lose(error)
            with self._changed:
                if version.anchor:
                    self._stored.append(Stored(None, version.manifest.version, self._anchor))
                del version  # frees its patches
                self._busy = False
                self._changed.notify_all()

    def _lose(self, error: Exception) -> None:
        """Give up the copy and all waiting versions, until `restart`."""
        self.lost = True
        anchors = (version.manifest.version for version in self._published if version.anchor)
        self._stored += [Stored(None, version, None) for version in anchors]
        self._published.clear()
        self._complain(error)

    def _complain(self, error: Exception) -> None:
        if str(error) != self._warned and not self._closed:
            _log.warning("no jumps and anchors for now: %s", error)
        self._warned = str(error)

    def _follow(self, version: Published) -> None:
        """Apply a version to the copy; make the shortcuts that are due."""
        number, patches = version.manifest.version, version.patches
        for start in self._starts:
            if start.version < 0:
                start.begin(self._version, self.path)
            start.add(patches, self.path, _budget(version.manifest))
        bits = map_folder(self.path, "r+")
        for patch in patches or ():
            codec.apply(patch, bits[patch.name])
        if patches is None:
            apply_delta(bits, version.file)
        self._version = number
        keeps_up = len(self._published) <= _BEHIND
        due = [start for start in self._starts if keeps_up and start.jump_is_due(number)]
        if due or version.anchor or self._unsent:
            self._make(version, due, bits)
        if isinstance(self._writer, RunWriter):
            self._writer.look_for_damage()

    def _make(self, version: Published, due: list[_Start], bits: dict[str, Bits]) -> None:
        number = version.manifest.version
        require_digest(bits, version.manifest, version.digest)
        for start in due:
            self._unsent.append(self._jump(start, bits))
            start.begin(number, self.path)
        while self._unsent:
            base, end, data, changed = self._unsent[0]
            some = changed or isinstance(self._writer, RunWriter)  # only rank 0 stores an empty part
            files = [self._writer.put_jump(base, end, data, changed)] if some else []
            self._unnamed |= {file.key: end for file in files}
            with self._changed:
                self._stored.append(Stored(base, end, files))
            del self._unsent[0]
        if version.anchor:
            self._anchor = self._writer.put_weights(number, sorted(self.path.iterdir()))
            self._unnamed |= {file.key: number for file in self._anchor}
        self._prune(version.manifest)

    def _jump(self, start: _Start, newest: dict[str, Bits]) -> tuple[int, int, bytes, int]:
        """Make the jump from `start` to the newest version. Return base, version, bytes, changes."""
        patches, old = start.jump(newest)
        base, version, sizes = start.version, self._version, list[int]()

        def counted() -> Iterator[Patch]:
            for patch in patches:
                if self._closed:
                    raise RuntimeError("the publisher is closing: this jump is dropped")
                sizes.append(patch.index.size)
                yield patch

        data = codec.encode(counted(), old, base=base, version=version, encoding=self._encoding)
        return base, version, data, sum(sizes)

    def _prune(self, newest: Manifest) -> None:
        """Prune the run as `keep` says. Of the size that `keep` allows, leave free the bytes of an anchor
        and twice the bytes that were added between the last two prunings."""
        if self._pruner is None:
            return
        room = newest.full_bytes + 2 * self._came
        # No manifest will name a file that is older than `oldest`: see `RunWriter.collect`.
        named, oldest = {file.key for file in newest.files}, newest.version - 2 * max(STRIDES)
        self._unnamed = {key: v for key, v in self._unnamed.items() if key not in named and v > oldest}
        try:
            survey = self._pruner.survey(self._unnamed, room)
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
    """Return a copy of a tensor's `bits` without `patches` (newest first; None stands for no change)."""
    bits = bits.copy()
    for patch in filter(None, patches):
        codec.apply(codec.inverse(patch), bits)
    return bits


def _budget(manifest: Manifest) -> int:
    return max(_SMALLEST, manifest.full_bytes // _SHARE)
