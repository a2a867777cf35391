"""Makes shortcuts to the newest version, in the background: jumps over several versions, and anchors.

No second model is kept for this. A jump over 8 versions is the exact merge of their patches, and a jump over
64 versions is the merge of eight such jumps. The patches wait in memory, up to a third of the size of this
rank's bf16 weights (or 16 MB, if that is more). Later patches, and the changes of each jump, wait in files
that are as small as deltas. An anchor is written from the mirror to files, which exist only until they are
uploaded. The mirror is ahead of the anchor's version, so the later patches are undone in each tensor.

Each rank makes shortcuts of the tensors that it owns. Jumps end at versions that are multiples of 8 or 64,
so ranks that keep up make the same jumps. A manifest names a shortcut once all ranks have stored their parts
of it. If the trainer crashes before that, the option `keep` or the command `gc` deletes the stored parts.
"""

import errno
import math
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import Shapes, map_folder
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.errors import BucketError, CodecError, ProtocolError
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.publish.spans import Span, digest_change, merged, undo, write, write_patches
from delta_weight_sync.publish.writer import PartWriter, RunWriter, Stored
from delta_weight_sync.reader import require_digest
from delta_weight_sync.records import STRIDES, FileRef, Manifest
from delta_weight_sync.scratch import Scratch, is_memory
from delta_weight_sync.util import SafeLogger

_BEHIND: Final = 16  # while more versions than this wait, anchors are made, but no jumps
_CLOSING_S: Final = 5.0
_SMALLEST: Final = 1 << 24  # bytes of memory that patches may always take
_SHARE: Final = 3  # patches may take up to 1 / _SHARE of the bf16 weights, if that is more than _SMALLEST
_UNSENT = 8  # max jumps that wait for the store; of more, the oldest are dropped
_log = SafeLogger()


@dataclass
class _Start:
    """The version where the next jump of one stride (8 or 64) begins."""

    stride: int
    version: int
    digest: str

    def jump_is_due(self, version: int) -> bool:
        """Whether a jump ends at `version`. The first jump spans at least half of `stride` versions. A later
        jump spans `stride` versions, or more after a backlog."""
        return version % self.stride == 0 and version - self.version >= self.stride // 2


class Published(NamedTuple):
    """A version that is in the bucket."""

    manifest: Manifest
    digest: str  # of this rank's tensors
    anchor: bool  # whether to make an anchor of this version


class Shortcuts:
    """Makes jumps and anchors. The outbox publishes versions; it calls `restart`, `begin` and `add` in order.

    Attributes:
        folder: A temporary folder.
    """

    def __init__(
        self,
        writer: PartWriter,
        encoding: Encoding,
        keep: Keep | None,
        changed: threading.Condition,
        bits: Callable[[str, int], Bits],
        files: Callable[[int, Path], Iterator[Path]],
    ) -> None:
        """
        Args:
            writer: Stores this rank's parts.
            encoding: The encoding of jumps.
            keep: How much of the run stays in the bucket; None for everything. Only rank 0 deletes.
            changed: The lock of the outbox.
            bits: Returns a tensor's bits at a version, by undoing what `after` returns.
            files: Writes the files of an anchor of a version to a folder.
        """
        self._writer = writer
        self._encoding = encoding
        self._pruner = Pruner(writer.reader, keep) if keep and isinstance(writer, RunWriter) else None
        self._changed = changed
        self._bits_at = bits
        self._files = files
        self._scratch = Scratch()
        self.folder = self._scratch.path
        if is_memory(self.folder):
            _log.warning(
                "temporary files go to %s, which takes memory (tmpfs), an anchor 2 bytes for each weight:"
                " set TMPDIR to a folder on a disk",
                self.folder.parent,
            )
        self._shapes: Shapes = {}  # of this rank's tensors
        self._spans: list[Span] = []  # what led to the newest version, oldest first, without a gap
        self._starts: list[_Start] = []
        self._newest = -1, ""  # the newest added version, and its digest
        self._published: deque[Published] = deque()
        self._anchor: list[FileRef] | None = None  # files of the anchor that `_make` has just stored
        self._stored: list[Stored] = []  # what `stored` returns next
        self._unnamed: dict[str, int] = {}  # key of a stored file that no manifest names yet -> version
        self._unsent: list[tuple[int, int, bytes, int]] = []  # jumps to upload, as `_jump` returns them
        self._busy = False
        self._closed = False
        self._warned = deque[str](maxlen=8)  # the last lines that were logged or came again
        self._stayed = 0  # bytes that the last pruning left
        self._came = 0  # bytes that were added between the last two prunings
        self._thread = threading.Thread(target=self._run, name="shortcuts", daemon=True)
        self._thread.start()

    def restart(self, version: int, digest: str, shapes: Shapes) -> None:
        """Begin at a version that no span leads to. `digest` and `shapes`: of this rank's tensors."""
        self._newest = (version, digest)
        self._shapes = shapes
        self._starts = [_Start(stride, version, digest) for stride in STRIDES]

    def begin(self, version: int, digest: str, patches: Sequence[Patch]) -> None:
        """Take the changes of a version that is about to be published. The caller holds the lock."""
        self._spans.append(Span(version - 1, version, digest, patches, self._shapes))

    def after(self, version: int) -> list[Span]:
        """The spans that lead from `version` to the last version that began. The caller holds the lock."""
        return [span for span in self._spans if span.base >= version]

    def stored(self) -> list[Stored]:
        """Return the parts that this rank has stored since the last call."""
        with self._changed:
            found = self._stored
            self._stored = []
            return found

    def add(self, version: Published, delta: bytes) -> None:
        """Add the version that began last and is now published, and the bytes of its delta."""
        budget = max(_SMALLEST, 2 * sum(map(math.prod, self._shapes.values())) // _SHARE)
        with self._changed:
            span = self._spans[-1]
            waiting = sum(each.nbytes for each in self._spans)
        if waiting > budget:
            file = self._file(span.base, span.version)
            source: Path | Exception = file
            try:
                write(file, delta, lambda: merged([span], self._shapes))
            except (OSError, CodecError) as error:
                source = error
            with self._changed:
                self._spans[-1] = Span(span.base, span.version, span.digest, source, self._shapes)
        with self._changed:
            self._newest = version.manifest.version, version.digest
            if not self._closed:
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
            except Exception as error:  # noqa: BLE001 - the run continues without shortcuts
                self._complain(error)
                self._begin_again()
            with self._changed:
                if version.anchor:
                    self._stored.append(Stored(None, version.manifest.version, self._anchor))
                self._busy = False
                self._changed.notify_all()

    def _begin_again(self) -> None:
        """Give up all versions that were added, and begin at the newest one."""
        with self._changed:
            anchors = (version.manifest.version for version in self._published if version.anchor)
            self._stored += [Stored(None, version, None) for version in anchors]
            self._published.clear()
            self._starts = [_Start(start.stride, *self._newest) for start in self._starts]
        self._trim()

    def _complain(self, error: Exception, said: str = "no jumps and anchors for now: %s") -> None:
        line = said % error
        if line not in self._warned and not self._closed:
            _log.warning("%s", line)
        self._warned.append(line)

    def _follow(self, version: Published) -> None:
        """Make the shortcuts that are due."""
        number = version.manifest.version
        keeps_up = len(self._published) <= _BEHIND
        due = [start for start in self._starts if keeps_up and start.jump_is_due(number)]
        if due or version.anchor or self._unsent:
            self._make(version, due)
        if isinstance(self._writer, RunWriter):
            try:
                self._writer.look_for_damage()
            except BucketError as error:  # the next version tries again
                self._complain(error, "the newest version was not checked for damage: %s")

    def _make(self, version: Published, due: list[_Start]) -> None:
        number = version.manifest.version
        for start in due:
            base = start.version
            self._unsent.append(self._jump(start, version))
            start.version = number
            start.digest = version.digest
            self._trim()
            self._join(base, version)
        try:
            self._put_jumps()
        except BucketError as error:  # the next version tries again
            self._complain(error)
        if version.anchor:
            try:
                self._anchor = self._put_anchor(version)
            except (OSError, BucketError) as error:  # the writer orders another anchor later
                self._complain(error)
            self._unnamed |= {file.key: number for file in self._anchor or ()}
        try:
            self._prune(version.manifest)
        except BucketError as error:  # the next jump tries again
            self._complain(error, "old versions were not deleted for now: %s")

    def _put_jumps(self) -> None:
        del self._unsent[:-_UNSENT]
        while self._unsent:
            base, end, data, changed = self._unsent[0]
            some = changed or isinstance(self._writer, RunWriter)  # only rank 0 stores an empty part
            files = [self._writer.put_jump(base, end, data, changed)] if some else []
            self._unnamed |= {file.key: end for file in files}
            with self._changed:
                self._stored.append(Stored(base, end, files))
            del self._unsent[0]

    def _jump(self, start: _Start, end: Published) -> tuple[int, int, bytes, int]:
        """Make the jump from `start` to `end`. Return base, version, bytes, changes."""
        base = start.version
        version = end.manifest.version
        digest = int(start.digest, 16)
        changes = 0
        # The encoder asks only for old bits of tensors whose patches it holds.
        held = WeakValueDictionary[str, Patch]()

        def counted() -> Iterator[Patch]:
            nonlocal digest, changes
            for patch in merged(self._between(base, version), self._shapes):
                digest += digest_change(patch, self._bits(patch.name, version))
                changes += patch.index.size
                held[patch.name] = patch
                yield patch

        def old(name: str) -> Bits:
            bits = self._bits(name, version)
            undo(bits, [held[name]])
            return bits

        data = codec.encode(counted(), old, base=base, version=version, encoding=self._encoding)
        self._rest()
        if to_hex(digest) != end.digest:
            raise ProtocolError(
                f"version {version} has digest {end.digest}, but the jump from version {base} to it gives"
                f" {to_hex(digest)}; the jump was dropped"
            )
        return base, version, data, changes

    def _put_anchor(self, version: Published) -> list[FileRef]:
        """Write this rank's files of an anchor, and upload them."""
        number = version.manifest.version
        folder = self.folder / "anchor"
        folder.mkdir()
        try:
            # The trainer needs the disk, too: do not fill it.
            if shutil.disk_usage(folder).free < 2 * sum(map(math.prod, self._shapes.values())):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            paths = [*self._files(number, folder)]
            self._rest()
            require_digest(map_folder(folder), version.manifest, version.digest)
            return self._writer.put_weights(number, consumed(paths))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _bits(self, name: str, version: int) -> Bits:
        if self._closed:
            raise RuntimeError("the publisher is closing: this jump is dropped")
        return self._bits_at(name, version)

    def _between(self, base: int, version: int) -> list[Span]:
        with self._changed:
            return [span for span in self._spans if base <= span.base and span.version <= version]

    def _join(self, base: int, version: Published) -> None:
        """Replace the spans from `base` to `version` by one in a file, if a longer jump will need them."""
        number = version.manifest.version
        if not (spans := self._between(base, number)):
            return
        file = self._file(base, number)
        write_patches(file, merged(spans, self._shapes), base, number)
        with self._changed:
            first = self._spans.index(spans[0])
            self._spans[first : first + len(spans)] = [Span(base, number, version.digest, file, self._shapes)]
        for span in spans:
            span.delete()

    def _trim(self) -> None:
        """Forget the spans that no jump needs any more."""
        oldest = min(start.version for start in self._starts)
        with self._changed:
            gone = [span for span in self._spans if span.version <= oldest]
            del self._spans[: len(gone)]
        for span in gone:
            span.delete()

    def _rest(self) -> None:
        with self._changed:
            spans = [*self._spans]
        for span in spans:
            span.rest()

    def _file(self, base: int, version: int) -> Path:
        return self.folder / f"{base:08d}-{version:08d}.delta"

    def _prune(self, newest: Manifest) -> None:
        """Prune the run as `keep` says. Of the size that `keep` allows, leave free the bytes of an anchor
        and twice the bytes that were added between the last two prunings."""
        if self._pruner is None:
            return
        room = newest.full_bytes + 2 * self._came
        # No manifest will name a file that is older than `oldest`: see `RunWriter.collect`.
        named = {file.key for file in newest.files}
        oldest = newest.version - 2 * max(STRIDES)
        self._unnamed = {key: v for key, v in self._unnamed.items() if key not in named and v > oldest}
        try:
            others = self._writer.unnamed if isinstance(self._writer, RunWriter) else frozenset[str]()
            survey = self._pruner.survey(others | self._unnamed.keys(), room)
        except ProtocolError as error:  # a damaged manifest does not say which files it needs
            _log.warning("deleted nothing of the run, because a manifest is damaged: %s", error)
            return
        if survey:
            self._came = survey.kept + survey.freed - self._stayed if self._stayed else 0
            self._stayed = survey.kept
            prune(self._writer.bucket, survey)


def consumed(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield paths, and delete each file when the next path is asked for."""
    for path in paths:
        yield path
        path.unlink()
