"""Writing a run: objects, then manifest, then HEAD, under a writer term that fences off any other writer."""

from __future__ import annotations

import hashlib
import tempfile
import time
import uuid
from pathlib import Path

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import MAX_CHAIN, AnchorRef, DeltaRef, FileRef, Head, Manifest, RunInfo
from delta_weight_sync.store import Bucket


class FencedError(DeltaWeightSyncError, RuntimeError):
    """Another trainer took the run over; this one must not publish any more."""


class RunWriter:
    """The one writer of a run. A crash between any two writes leaves the previous HEAD good."""

    def __init__(self, bucket: Bucket, run: str, *, model: str, assets: Path | None) -> None:
        """`assets` holds the small files of a checkpoint: config, tokenizer, chat template.

        A run that exists has them already: there `assets` may be None.
        """
        self.reader = RunReader(bucket, run)
        self.bucket, self.keys, self.model, self.assets = bucket, self.reader.keys, model, assets
        self.writer = uuid.uuid4().hex
        head = self.reader.head()
        self.writer_term = head.writer_term + 1 if head else 1
        self.newest = self.reader.manifest(head.manifest) if head else None
        self._previous_anchor = self.newest.version - len(self.newest.deltas) if self.newest else 0
        self._asset_refs: list[FileRef] = []
        if head:
            self._put_head(head.version, head.manifest)

    def resume(self) -> dict[str, Bits] | None:
        """The weights of the newest version, or None for a run that has none yet."""
        if self.newest is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return self.reader.checkout(self.newest, Path(folder))

    def anchor_is_due(self, delta_bytes: int) -> bool:
        """True once the chain costs a joining replica as much as a whole checkpoint would."""
        if self.newest is None:
            return True
        chain = self.newest.deltas_after(self.newest.anchor.version) or ()
        cost = sum(d.size for d in chain) + delta_bytes
        return cost >= self.newest.full_bytes or len(chain) + 1 >= MAX_CHAIN

    def put_anchor(self, version: int, weights_file: Path) -> AnchorRef:
        """Store every tensor of `version` in full, beside the files that make it a checkpoint."""
        weights = self._put_file(weights_file, self.keys.anchor(version, self.writer_term, weights_file.name))
        self._asset_refs = self._asset_refs or self._put_assets(version)
        return AnchorRef(version=version, files=(weights, *self._asset_refs))

    def _put_assets(self, version: int) -> list[FileRef]:
        if self.assets is None:
            known = self.newest.anchor.files if self.newest else ()
            return [file for file in known if not file.name.endswith(".safetensors")]
        return [
            self._put_file(path, self.keys.anchor(version, self.writer_term, path.name))
            for path in sorted(self.assets.iterdir())
            if path.is_file() and path.suffix != ".safetensors"
        ]

    def put_delta(self, version: int, data: bytes, changed: int) -> DeltaRef:
        """Store the delta that leads to `version`."""
        key = self.keys.delta(version, self.writer_term)
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
        """Make the next version real: its manifest, then HEAD. `FencedError` if the run was taken over."""
        previous = self.newest
        if anchor and previous:
            self._previous_anchor = previous.anchor.version
        newest_anchor = anchor or (previous.anchor if previous else None)
        assert newest_anchor is not None, "version 0 needs an anchor"
        deltas = (*previous.deltas, delta) if previous and delta else ()
        manifest = Manifest(
            run=self.keys.run,
            version=previous.version + 1 if previous else 0,
            writer_term=self.writer_term,
            sync=sync,
            created_at=created_at,
            digest=digest,
            anchor=newest_anchor,
            deltas=tuple(d for d in deltas if d.version > self._previous_anchor),
            parent=self._ref(previous) if previous else None,
            changed=delta.changed if delta else 0,
            total=total,
            full_bytes=2 * total,
        )
        if previous is None:
            self._put_info(manifest)
        ref = self._ref(manifest)
        self.bucket.put(ref.key, manifest.to_bytes())
        self._require_ownership()
        self._put_head(manifest.version, ref)
        self.newest = manifest
        return manifest

    def adopt(self, digest: str) -> Manifest | None:
        """The manifest of the next version if HEAD already names it: a commit whose answer was lost."""
        head = self.reader.head()
        if head is None or head.writer != self.writer:
            return None
        manifest = self.reader.manifest(head.manifest)
        if manifest.digest != digest or (self.newest and manifest.version != self.newest.version + 1):
            return None
        self.newest = manifest
        return manifest

    def _require_ownership(self) -> None:
        head = self.reader.head()
        if (
            head
            and (head.writer_term, head.writer) != (self.writer_term, self.writer)
            and head.writer_term >= self.writer_term
        ):
            raise FencedError(
                f"run {self.keys.run!r} in {self.bucket.url} was taken over by another trainer (term "
                f"{head.writer_term}); stop one of the two, or give this one another run name"
            )

    def _put_head(self, version: int, manifest: FileRef) -> None:
        head = Head(
            run=self.keys.run,
            version=version,
            manifest=manifest,
            writer_term=self.writer_term,
            writer=self.writer,
        )
        self.bucket.put(self.keys.head, head.to_bytes())

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

    def _ref(self, manifest: Manifest) -> FileRef:
        data = manifest.to_bytes()
        key = self.keys.manifest(manifest.version, manifest.writer_term)
        return FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())
