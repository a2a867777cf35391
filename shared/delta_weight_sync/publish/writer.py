"""Writes a run: files and manifest first, HEAD last, under keys that no other writer uses.

Each rank of a trainer stores its own parts of deltas, of jumps (deltas over several versions) and of anchors
(`PartWriter`). Once all parts are stored, rank 0 names them in a manifest, and writes HEAD (`RunWriter`).
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from delta_weight_sync import records
from delta_weight_sync.checkpoint import INDEX
from delta_weight_sync.errors import (
    BucketError,
    FencedError,
    ObjectMissingError,
    ProtocolError,
)
from delta_weight_sync.publish.run_page import run_page
from delta_weight_sync.reader import Problems, RunReader
from delta_weight_sync.records import (
    AnchorRef,
    DeltaRef,
    FileRef,
    Head,
    Manifest,
    RunInfo,
    Writer,
    joined,
)
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.signing import Kind, writer_keys
from delta_weight_sync.store import Bucket, ObjectInfo, Objects, file_sha256
from delta_weight_sync.util import SafeLogger

_EVERY = 16  # versions between two looks for damage
_ANCHOR_PAUSE = 8  # versions between two orders of an anchor, which takes a copy of the model on disk
_log = SafeLogger()


class Stored(NamedTuple):
    """A rank's part of a jump from `base` to `version`, or of an anchor (`base` is None), in the bucket."""

    base: int | None
    version: int
    files: Sequence[FileRef] | None  # None: the rank could not store it


class PartWriter:
    """Stores what one rank owns of a run. `part` is in the keys of this rank's deltas and jumps."""

    def __init__(self, reader: RunReader, writer: Writer, newest: Manifest | None, part: str = "") -> None:
        self.reader = reader
        self.bucket = reader.bucket
        self.keys = reader.keys
        self.writer = writer
        self.newest = newest
        self.part = part
        self.receipts: Mapping[str, str] = {}  # key -> receipt, of parts of the next version

    def put_delta(self, version: int, data: bytes, changed: int) -> DeltaRef:
        """Upload this rank's part of the delta to `version`. On the Hub, an upload alone stores no object:
        the part becomes an object when rank 0, which gets the part's receipt, calls `commit`."""
        key = self.keys.delta(version, self.writer, self.part)
        self.receipts = {key: receipt} if (receipt := self.bucket.upload(key, data)) else {}
        return _delta(key, data, version - 1, version, changed)

    def put_jump(self, base: int, version: int, data: bytes, changed: int) -> DeltaRef:
        """Store this rank's part of a jump between published versions."""
        key = self.keys.jump(base, version, self.writer, self.part)
        self.bucket.put(key, data)
        return _delta(key, data, base, version, changed)

    def put_weights(self, version: int, paths: Iterable[Path]) -> list[FileRef]:
        """Store this rank's files of the anchor of `version`: weights, and on rank 0 their index, if any."""
        return [self._put_file(version, path, path.name) for path in paths]

    def _put_file(self, version: int, path: Path, name: str) -> FileRef:
        return put_file(self.bucket, path, self.keys.anchor(version, self.writer, name))


class RunWriter(PartWriter):
    """The one writer of a run. A crash between any two writes leaves the previous HEAD valid.

    Creating a `RunWriter` fences off any other writer. A new run needs the name of its base `model`, and
    `assets`: the folder with the small files of a checkpoint (config, tokenizer, chat template).
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        *,
        model: str,
        assets: Path | None,
        signing_key: str | Path | None = None,
    ) -> None:
        self._signing_key, trusted = writer_keys(signing_key)
        reader = RunReader(bucket, run, trusted)
        others = reader.writers()
        super().__init__(reader, Writer.after(others), None)
        self.model = model
        self.assets = assets
        self._asset_refs: list[FileRef] = []
        self._decided: Manifest | None = None  # the next version, until it is in the bucket
        self._delta: tuple[str, bytes] | None = None  # key and content of that version's delta
        self.ordered: int | None = None  # the version of an anchor that not all ranks have stored yet
        self._next_anchor = 0  # after an anchor that failed: the version from which to order another
        self._parts: dict[tuple[int | None, int], dict[int, Stored]] = {}  # (base, version) -> rank -> part
        self._jumps: list[DeltaRef] = []  # stored by all ranks, but named by no manifest yet
        self.unnamed = frozenset[str]()  # keys of the parts of jumps and anchors that ranks had stored lately
        self._new_anchor: AnchorRef | None = None  # stored by all ranks, but named by no manifest yet
        self._considered = 0  # length of `_jumps` when `_decided` was made
        self._listed: dict[str, ObjectInfo | None] = {}  # files of the version that was last found intact
        self._intact = 0  # the last version whose files were all found as published
        self._damaged = False  # whether the last look found damage that no anchor has repaired
        self._started = time.time()
        self.on_version: Callable[[Manifest], object] | None = None  # called after each version; may not wait
        self.log: RunLogWriter | None = None  # its events travel with the next version
        self.newest = self._claim(others)

    def _claim(self, others: list[Writer]) -> Manifest | None:
        """Take the run over; returns its newest version.

        This writer claims the run by storing a HEAD, then looks again for versions of others. Every writer
        looks for claims after it has published. So if another writer publishes meanwhile, either this writer
        continues from that version, or the other writer sees the claim and drops that version. The idea is
        Lamport's bakery algorithm (1974).
        """
        newest = self._last_of_others()
        self._put([self._head(newest)])
        try:
            self._require_ownership()
        except FencedError:
            self.bucket.delete([self.keys.head(self.writer)])
            raise
        if (latest := self._last_of_others()) != newest:
            self._put([self._head(latest)])
        # Replicas poll the HEAD that they know. If that is gone, they look for this writer's.
        self.bucket.delete([self.keys.head(other) for other in others])
        return latest

    def _last_of_others(self) -> Manifest | None:
        """Return the newest version of earlier writers, even if its writer died before HEAD named it."""
        if (head := self.reader.head(below=self.writer)) is None:
            return None
        last = self.reader.rebuild_head(Writer(head.writer_term, head.writer))
        return self.reader.resolve(last if last and last.rank > head.rank else head)

    def anchor_is_due(self) -> bool:
        """Whether an anchor is needed: a join would fetch too much, or the newest version is damaged."""
        newest = self.newest
        if newest is None or self._new_anchor or self.ordered:
            return False
        if self._damaged:
            return True
        if newest.version < self._next_anchor:
            return False
        deltas = *newest.deltas, *newest.jumps, *self._jumps
        recipe = records.cheapest_recipe(newest.anchor, deltas, newest.version, None)
        behind = recipe.deltas if recipe else ()
        many = len({delta.version for delta in behind}) >= records.MAX_FILES
        many = many or len(newest.deltas) >= records.MAX_REFS // 2
        return many or sum(d.size for d in behind) > records.ANCHOR_PAYS * newest.full_bytes

    def look_for_damage(self) -> None:
        """Find out whether a file of the newest version is missing or has changed, so that an anchor is due.

        The store is asked for the sizes and etags of these files every `_EVERY` versions, or at each call
        while there is damage. This writer knows the right etag of a file only after a look that found the
        file and no damage. Until then, it also reads and hashes the file if it is one of the checkpoint's
        small files. It reads no weights and deltas here.
        """
        newest = self.newest
        if newest is None or self._new_anchor or self.ordered or newest.version < self._intact + _EVERY:
            return
        files = newest.recipe().files
        if not self.assets:  # without the base model, small files cannot be stored again
            files = tuple(file for file in files if file.name.endswith(".safetensors"))
        there = self.bucket.stat_all([file.key for file in files])
        listed = {file.key: there.get(file.key) for file in files}
        self._damaged = any(self._is_damaged(file, listed[file.key]) for file in files)
        if not self._damaged:
            self._listed = listed
            self._intact = newest.version

    def _is_damaged(self, file: FileRef, now: ObjectInfo | None) -> bool:
        if now is None or now.size != file.size:
            return True
        if before := self._listed.get(file.key):
            return now.etag != before.etag
        if file.name.endswith(".safetensors"):
            return False
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.reader.fetch(file, Path(folder))
        except (ProtocolError, ObjectMissingError):
            return True
        return False

    def put_weights(self, version: int, paths: Iterable[Path]) -> list[FileRef]:
        """As in `PartWriter`. Also return the references of the base's small files (config and tokenizer).
        This writer stores these with its first anchor, and again after damage. A writer without `assets`
        cannot store them, and names those of the newest anchor."""
        weights = super().put_weights(version, paths)
        if self.assets and (self._damaged or not self._asset_refs):
            files = [path for path in sorted(self.assets.rglob("*")) if path.is_file()]
            named = [(path, path.relative_to(self.assets).as_posix()) for path in files]
            self._asset_refs = [
                self._put_file(version, path, name) for path, name in named if path.suffix != ".safetensors"
            ]
        elif self.newest and not self._asset_refs:
            self._asset_refs = [file for file in self.newest.anchor.small if file.name != INDEX]
        self._damaged = False
        return [*weights, *self._asset_refs]

    def put_delta(self, version: int, data: bytes, changed: int) -> DeltaRef:
        """With one rank, only remember the delta: `commit` stores it together with manifest and HEAD. With
        several ranks, upload rank 0's part now."""
        if self.part:
            return super().put_delta(version, data, changed)
        key = self.keys.delta(version, self.writer, self.part)
        self._delta = key, data
        return _delta(key, data, version - 1, version, changed)

    def collect(self, stored: Sequence[Sequence[Stored]]) -> None:
        """Take the parts that each rank has stored (`stored[rank]`). Once all ranks have stored their parts
        of a jump or an anchor, the next manifest names that jump or anchor."""
        for rank, parts in enumerate(stored):
            for part in parts:
                self._parts.setdefault((part.base, part.version), {})[rank] = part
        for base, version in [*self._parts]:
            found = sorted(self._parts[base, version].items())
            late = self.newest and version < self.newest.version - 2 * max(records.STRIDES)
            if len(found) < len(stored) and not late:
                continue
            del self._parts[base, version]
            if (base, version) == (None, self.ordered):
                self.ordered = None
            # A rank that was far behind has no part; the files of a part that was never made are None.
            if len(found) == len(stored) and all(part.files is not None for _, part in found):
                files = [file for _, part in found for file in part.files or ()]
                if base is None:
                    self._new_anchor = AnchorRef(version=version, files=tuple(files))
                else:
                    self._jumps += joined([file for file in files if isinstance(file, DeltaRef)])
            elif base is None:
                self._next_anchor = version + _ANCHOR_PAUSE
        waiting = [part for ranks in self._parts.values() for part in ranks.values()]
        files = [file for part in waiting for file in part.files or ()]
        files += [*self._jumps, *(self._new_anchor.files if self._new_anchor else ())]
        self.unnamed = frozenset(file.key for file in files)

    def commit(
        self,
        delta: Sequence[DeltaRef],
        anchor: AnchorRef | None,
        *,
        digest: str,
        sync: int,
        total: int,
        full_bytes: int,
        created_at: float,
    ) -> Manifest:
        """Decide what the next version holds, and publish this version. Raises the errors of `confirm`.

        `delta`: the parts of the delta from the version before; empty for a version that is published whole.
        """
        delta = joined(delta)
        previous = self.newest
        version = self.newest.version + 1 if self.newest else 0
        newest_anchor = anchor or self._new_anchor or (previous.anchor if previous else None)
        assert newest_anchor is not None, "version 0 needs an anchor"
        deltas = (*previous.deltas, *delta) if previous and delta else ()
        new = tuple(self._jumps)
        self._considered = len(new)
        jumps = (*previous.jumps, *new) if previous and delta else ()
        deltas, jumps = records.links_for(newest_anchor, deltas, jumps, version)
        manifest = Manifest(
            run=self.keys.run,
            born=previous.born if previous else self._started,
            version=version,
            writer_term=self.writer.term,
            writer=self.writer.id,
            sync=sync,
            created_at=created_at,
            digest=digest,
            anchor=newest_anchor,
            deltas=deltas,
            jumps=jumps,
            parent=self._reference(previous) if previous else None,
            changed=delta[0].changed if delta else 0,
            total=total,
            full_bytes=full_bytes,
        )
        self._decided = self.signed(manifest)
        return self.confirm()

    def signed(self, record: Kind) -> Kind:
        """The record with a signature, if this trainer has a key."""
        return self._signing_key.sign(record) if self._signing_key else record

    def confirm(self) -> Manifest:
        """Publish the decided version: store its delta and manifest, then HEAD.

        After each `BucketError`, call this again: the manifest may be in the bucket already, so the version
        must stay the same. If another trainer took over, raises `FencedError`; the version does not count.
        """
        manifest = self._decided
        assert manifest is not None, "no version is decided"
        objects = [self._delta] if self._delta else []
        if manifest.version == 0:
            full = manifest.full_bytes
            now = time.time()
            info = RunInfo(run=self.keys.run, model=self.model, created_at=now, full_bytes=full)
            objects.append((self.keys.info, info.to_bytes()))
            objects.append((self.keys.page, run_page(self.bucket.url, self.model, manifest)))
        objects.append((self._reference(manifest).key, manifest.to_bytes()))
        self._put([*objects, self._head(manifest)], log=self.log)
        self._require_ownership()
        self.newest = manifest
        self._decided = None
        self._delta = None
        self.receipts = {}
        del self._jumps[: self._considered]
        if self._new_anchor == manifest.anchor:
            self._new_anchor = None
        if self.on_version:
            self.on_version(manifest)
        return manifest

    def _require_ownership(self) -> None:
        refused: Problems = {}
        owner = self.reader.successor(self.writer, self.newest.born if self.newest else None, refused)
        for error in refused.values():
            _log.warning("%s; this trainer continues", error)
        if owner:
            raise FencedError(
                f"run {self.keys.run!r} in {self.bucket.url} was taken over by another trainer (term "
                f"{owner.term}); stop one of the two, or give this one another run name"
            )

    def _head(self, newest: Manifest | None) -> tuple[str, bytes]:
        head = Head(
            run=self.keys.run,
            born=newest.born if newest else self._started,
            version=newest.version if newest else None,
            manifest=self._reference(newest) if newest else None,
            writer_term=self.writer.term,
            writer=self.writer.id,
        )
        return self.keys.head(self.writer), self.signed(head).to_bytes()

    def _put(self, objects: list[tuple[str, bytes]], log: RunLogWriter | None = None) -> None:
        """Store objects, the last of which is HEAD, and with them what `log` has to write."""
        logged: Objects = ()
        try:
            with log.riding() if log else nullcontext(()) as logged:
                self.bucket.put_all([*objects[:-1], *logged, objects[-1]], self.receipts)
        except BucketError:
            self._require_ownership()  # if another trainer took over, that is the error to report
            if not logged:
                raise
            self.bucket.put_all(objects, self.receipts)  # perhaps only the log could not be stored

    def _reference(self, manifest: Manifest) -> FileRef:
        writer = Writer(manifest.writer_term, manifest.writer)
        return records.reference(self.keys.manifest(manifest.version, writer), manifest)


def _delta(key: str, data: bytes, base: int, version: int, changed: int) -> DeltaRef:
    sha256 = hashlib.sha256(data).hexdigest()
    return DeltaRef(key=key, size=len(data), sha256=sha256, base=base, version=version, changed=changed)


def put_file(bucket: Bucket, path: Path, key: str) -> FileRef:
    """Store a local file, and return a reference with its size and sha256."""
    bucket.put(key, path)
    return FileRef(key=key, size=path.stat().st_size, sha256=file_sha256(path))
