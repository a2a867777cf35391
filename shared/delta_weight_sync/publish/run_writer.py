"""Writing a run: objects, then manifest, then HEAD, under names that no other writer has."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.heads import Kind, Refused
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer
from delta_weight_sync.protocol import Head, Manifest, RunInfo, reference
from delta_weight_sync.publish.inspection import Inspection
from delta_weight_sync.publish.offers import Offer, Offers
from delta_weight_sync.refs import AnchorRef, DeltaRef, FileRef
from delta_weight_sync.signing import signs_here
from delta_weight_sync.store import Bucket, BucketError
from delta_weight_sync.ways import ANCHOR_PAYS, MAX_FILES, cheapest, listed

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
        self._offers, self._weighed = Offers(), Offer()  # `_weighed`: what was there when that was decided
        self._inspection = Inspection(self.reader)
        self._started = time.time()
        self.newest: Manifest | None = None
        self.on_version: Callable[[Manifest], object] = _nothing  # told of each version that is real
        others = self.reader.writers()
        self.writer = Writer.after(others)
        self.newest = self._claim(others)

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

    def resume(self, folder: Path) -> dict[str, Bits] | None:
        """The weights of the newest version, in `folder` too; None for a run that has none yet."""
        return self.reader.checkout(self.newest, folder) if self.newest else None

    def anchor_is_due(self) -> bool:
        """True once a joining replica would fetch so much behind the anchor that a new one pays."""
        newest, (jumps, anchor) = self.newest, self._offers.now()
        if newest is None or anchor:
            return False
        if self._inspection.finds_damage(newest):
            self._asset_refs = []  # the next anchor has files of its own beside its weights
            return True
        way = cheapest(newest.anchor, (*newest.deltas, *newest.jumps, *jumps), newest.version, None)
        behind = way.deltas if way else ()
        return sum(d.size for d in behind) > ANCHOR_PAYS * newest.full_bytes or len(behind) >= MAX_FILES

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
        return self._put_delta(self.keys.delta(version, self.writer), data, version - 1, version, changed)

    def _put_delta(self, key: str, data: bytes, base: int, version: int, changed: int) -> DeltaRef:
        self.bucket.put(key, data)
        sha256 = hashlib.sha256(data).hexdigest()
        return DeltaRef(key=key, size=len(data), sha256=sha256, base=base, version=version, changed=changed)

    def offer_jump(self, base: int, version: int, data: bytes, changed: int) -> None:
        """Store a delta over several published versions, for the next manifest to name. By any thread."""
        key = self.keys.jump(base, version, self.writer)
        self._offers.add_jump(self._put_delta(key, data, base, version, changed))

    def offer_anchor(self, version: int, weights_file: Path) -> None:
        """Store an anchor of a published version, for the next manifest to name. By any thread."""
        self._offers.add_anchor(self.put_anchor(version, weights_file))

    def offered(self) -> set[str]:
        """Keys of what is in the bucket, and named by no version that is real."""
        jumps, anchor = self._offers.now()
        return {ref.key for ref in (*jumps, *(anchor.files if anchor else ()))}

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
        previous, version = self.newest, self.newest.version + 1 if self.newest else 0
        self._weighed = jumps, offered = self._offers.now()
        newest_anchor = anchor or offered or (previous.anchor if previous else None)
        assert newest_anchor is not None, "version 0 needs an anchor"
        if previous and delta:
            names = listed(newest_anchor, (*previous.deltas, delta), (*previous.jumps, *jumps), version)
        else:
            names = listed(newest_anchor, (), (), version)
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
            deltas=names.deltas,
            jumps=names.jumps,
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
        self._offers.take(self._weighed)
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
        try:
            self.bucket.put(self.keys.head(self.writer), self.signed(head).to_bytes())
        except BucketError:
            self._require_ownership()  # a successor may have removed it before it was seen to be there
            raise

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
