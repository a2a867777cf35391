"""Writing a run: objects, then manifest, then HEAD, under names that no other writer has."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.heads import Kind, Refused
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer
from delta_weight_sync.protocol import (
    MAX_CHAIN,
    AnchorRef,
    DeltaRef,
    FileRef,
    Head,
    Manifest,
    RunInfo,
    reference,
)
from delta_weight_sync.signing import signs_here
from delta_weight_sync.store import Bucket, ObjectInfo

_INSPECT_EVERY = 16  # versions; each time the run is listed
_log = logging.getLogger("delta_weight_sync")


def _nothing(_: Manifest) -> None:
    """Nobody wants to know."""


class FencedError(DeltaWeightSyncError, RuntimeError):
    """Another trainer took the run over; this one must not publish any more."""


class RunWriter:
    """The one writer of a run. A crash between any two writes leaves the previous HEAD good."""

    def __init__(self, bucket: Bucket, run: str, *, model: str, assets: Path | None) -> None:
        """`assets` holds the small files of a checkpoint: config, tokenizer, chat template.

        A run that exists has them already: there `assets` may be None.
        """
        self._signing_key = signs_here()
        self.reader = RunReader(bucket, run)
        self.bucket, self.keys, self.model, self.assets = bucket, self.reader.keys, model, assets
        self._asset_refs: list[FileRef] = []
        self._decided: Manifest | None = None  # the next version, as long as the store has not taken it
        self._seen: dict[
            str, ObjectInfo | None
        ] = {}  # the files of the newest version, when they were listed
        self._started = time.time()
        self.newest: Manifest | None = None
        self.on_version: Callable[[Manifest], object] = _nothing  # told of each version that is real
        others = self.reader.writers()
        self.writer = Writer.after(others)
        self.newest = self._claim(others)
        self._previous_anchor = self.newest.version - len(self.newest.deltas) if self.newest else 0

    @property
    def writer_term(self) -> int:
        """How many trainers have had this run, this one included."""
        return self.writer.term

    def _claim(self, others: list[Writer]) -> Manifest | None:
        """Take the run over; returns its newest version.

        The claim is written before the last look at what others published, and whoever publishes looks for
        claims after that: so either we go on from their version, or they learn that it does not count.
        Lamport's bakery is the model (Communications of the ACM 17, 1974); it needs put and list only.
        """
        newest = self._last_of_others()
        self._put_head(newest)
        try:
            self._require_ownership()
        except FencedError:
            self.bucket.delete([self.keys.head(self.writer)])
            raise
        if (latest := self._last_of_others()) != newest:
            self._put_head(latest)
        # Replicas ask for the HEAD that they know: that it is gone tells them of this writer.
        self.bucket.delete([self.keys.head(other) for other in others])
        return latest

    def _last_of_others(self) -> Manifest | None:
        """The newest version of an earlier writer, also one that it could not point HEAD to any more."""
        head = self.reader.head(below=self.writer)
        if head is None:
            return None
        last = self.reader.rebuilt(Writer(head.writer_term, head.writer))
        return self.reader.named(last if last and last.rank > head.rank else head)

    def resume(self) -> dict[str, Bits] | None:
        """The weights of the newest version, or None for a run that has none yet."""
        if self.newest is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return self.reader.checkout(self.newest, Path(folder))

    def anchor_is_due(self, delta_bytes: int) -> bool:
        """True once the chain costs a joining replica as much as a whole checkpoint would."""
        if self.newest is None or self._is_damaged(self.newest):
            return True
        chain = self.newest.deltas_after(self.newest.anchor.version) or ()
        cost = sum(d.size for d in chain) + delta_bytes
        return cost >= self.newest.full_bytes or len(chain) + 1 >= MAX_CHAIN

    def _is_damaged(self, newest: Manifest) -> bool:
        """Whether a file of the newest version is gone, or not what it was when this was asked last."""
        if newest.version % _INSPECT_EVERY:
            return False
        there, before = {info.key: info for info in self.bucket.list(self.keys.folder)}, self._seen
        self._seen = {file.key: there.get(file.key) for file in newest.files()}
        return any(
            info is None or info.size != file.size or before.get(file.key, info) != info
            for file in newest.files()
            for info in [self._seen[file.key]]
        )

    def put_anchor(self, version: int, weights_file: Path) -> AnchorRef:
        """Store every tensor of `version` in full, beside the files that make it a checkpoint."""
        weights = self._put_file(weights_file, self.keys.anchor(version, self.writer, weights_file.name))
        self._asset_refs = self._asset_refs or self._put_assets(version)
        return AnchorRef(version=version, files=(weights, *self._asset_refs))

    def _put_assets(self, version: int) -> list[FileRef]:
        if self.assets is None:
            known = self.newest.anchor.files if self.newest else ()
            return [file for file in known if not file.name.endswith(".safetensors")]
        return [
            self._put_file(path, self.keys.anchor(version, self.writer, path.name))
            for path in sorted(self.assets.iterdir())
            if path.is_file() and path.suffix != ".safetensors"
        ]

    def put_delta(self, version: int, data: bytes, changed: int) -> DeltaRef:
        """Store the delta that leads to `version`."""
        key = self.keys.delta(version, self.writer)
        self.bucket.put(key, data)
        sha256 = hashlib.sha256(data).hexdigest()
        return DeltaRef(key=key, size=len(data), sha256=sha256, version=version, changed=changed)

    def commit(
        self,
        delta: DeltaRef | None,
        anchor: AnchorRef | None,
        *,
        digest: str,
        sync: int,
        total: int,
        created_at: float,
    ) -> Manifest:
        """Decide what the next version is, and make it real; raises as `confirm`."""
        previous = self.newest
        if anchor and previous:
            self._previous_anchor = previous.anchor.version
        newest_anchor = anchor or (previous.anchor if previous else None)
        assert newest_anchor is not None, "version 0 needs an anchor"
        deltas = (*previous.deltas, delta) if previous and delta else ()
        manifest = Manifest(
            run=self.keys.run,
            born=previous.born if previous else self._started,
            version=previous.version + 1 if previous else 0,
            writer_term=self.writer.term,
            writer=self.writer.id,
            sync=sync,
            created_at=created_at,
            digest=digest,
            anchor=newest_anchor,
            deltas=tuple(d for d in deltas if d.version > self._previous_anchor),
            parent=self._reference(previous) if previous else None,
            changed=delta.changed if delta else 0,
            total=total,
            full_bytes=2 * total,
        )
        self._decided = self.signed(manifest)
        confirmed = self.confirm()
        assert confirmed is not None, "it has just been decided"
        return confirmed

    def signed(self, record: Kind) -> Kind:
        """The record as readers want it: with a signature, where this trainer has a key for that."""
        return self._signing_key.sign(record) if self._signing_key else record

    def confirm(self) -> Manifest | None:
        """Make the version real that was decided; None if none is.

        Its manifest may be in the bucket already, so this is to be called again after each `BucketError`:
        the version is never another one. Raises `FencedError` if the run was taken over, after which
        the version does not count.
        """
        manifest = self._decided
        if manifest is None:
            return None
        if manifest.version == 0:
            self._put_info(manifest)
        self.bucket.put(self._reference(manifest).key, manifest.to_bytes())
        self._put_head(manifest)
        self._require_ownership()
        self.newest, self._decided = manifest, None
        self.on_version(manifest)
        return manifest

    def _require_ownership(self) -> None:
        refused: Refused = {}
        owner = self.reader.successor(self.writer, self.newest.born if self.newest else None, refused)
        for error in refused.values():
            _log.warning("%s; this trainer goes on", error)
        if owner:
            raise FencedError(
                f"run {self.keys.run!r} in {self.bucket.url} was taken over by another trainer (term "
                f"{owner.term}); stop one of the two, or give this one another run name"
            )

    def _put_head(self, newest: Manifest | None) -> None:
        head = Head(
            run=self.keys.run,
            born=newest.born if newest else self._started,
            version=newest.version if newest else None,
            manifest=self._reference(newest) if newest else None,
            writer_term=self.writer.term,
            writer=self.writer.id,
        )
        self.bucket.put(self.keys.head(self.writer), self.signed(head).to_bytes())

    def _put_info(self, manifest: Manifest) -> None:
        info = RunInfo(
            run=self.keys.run, model=self.model, created_at=time.time(), full_bytes=manifest.full_bytes
        )
        self.bucket.put(self.keys.info, info.to_bytes())

    def _put_file(self, path: Path, key: str) -> FileRef:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self.bucket.put(key, path)
        return FileRef(key=key, size=path.stat().st_size, sha256=sha256)

    def _reference(self, manifest: Manifest) -> FileRef:
        writer = Writer(manifest.writer_term, manifest.writer)
        return reference(self.keys.manifest(manifest.version, writer), manifest)
