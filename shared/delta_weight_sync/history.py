"""Reading a run: HEAD, manifests, verified files, and any version as an ordinary checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.protocol import FileRef, Head, Keys, Manifest, ProtocolError, parse
from delta_weight_sync.store import Bucket, ObjectMissing

_CHUNK = 1 << 20


class RunReader:
    """The reading half of the protocol. Everything it returns was checked against HEAD's chain of hashes."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self.bucket = bucket
        self.keys = Keys(run)

    def head(self) -> Head | None:
        """The newest version, or None before the first one is published."""
        try:
            return parse(Head, self.bucket.get(self.keys.head), self.keys.head)
        except ObjectMissing:
            return None

    def manifest(self, ref: FileRef) -> Manifest:
        """The manifest that `ref` pins."""
        data = self.bucket.get(ref.key)
        ref.check(data)
        return parse(Manifest, data, ref.key)

    def history(self) -> Iterator[Manifest]:
        """Every manifest from HEAD back to version 0."""
        head = self.head()
        ref = head.manifest if head else None
        while ref is not None:
            manifest = self.manifest(ref)
            yield manifest
            ref = manifest.parent

    def at(self, version: int | None = None) -> Manifest:
        """The manifest of `version` (None: the newest); raises `ProtocolError` where there is none."""
        for manifest in self.history():
            if version in (None, manifest.version):
                return manifest
        wanted = "a first version" if version is None else f"version {version}"
        raise ProtocolError(f"run {self.keys.run!r} in {self.bucket.url} has not published {wanted}")

    def fetch(self, ref: FileRef, folder: Path) -> Path:
        """Download one file and check its size and sha256 (Xet downloads check nothing themselves)."""
        path = folder / ref.name
        self.bucket.fetch(ref.key, path)
        if path.stat().st_size != ref.size or _sha256(path) != ref.sha256:
            path.unlink()
            raise ref.damaged()
        return path

    def checkout(self, manifest: Manifest, folder: Path) -> dict[str, Bits]:
        """Write `manifest`'s version to `folder` as a Hugging Face checkpoint; returns its weights' bits.

        The newest anchor, then the deltas after it; the digest is checked before the weights are written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for ref in manifest.anchor.files:
            self.fetch(ref, folder)
        state = dict(checkpoint.read_bits(folder))
        for delta in manifest.deltas_after(manifest.anchor.version) or ():
            self.advance(state, delta, folder)
        require_digest(state, manifest)
        shapes = {name: bits.shape for name, bits in state.items()}
        checkpoint.write_bits(shapes, state.__getitem__, folder / checkpoint.WEIGHTS)
        return state

    def advance(self, state: dict[str, Bits], ref: FileRef, folder: Path) -> None:
        """Apply one delta file to `state` in place; `folder` is scratch space."""
        path = self.fetch(ref, folder)
        shapes = {name: bits.shape for name, bits in state.items()}
        for patch in codec.Delta(path).patches(shapes, state.__getitem__):
            codec.apply(patch, state[patch.name])
        path.unlink()


def require_digest(state: dict[str, Bits], manifest: Manifest) -> None:
    """Raise `ProtocolError` unless `state` is exactly the published bits of the manifest's version."""
    digest = to_hex(state_digest(state))
    if digest != manifest.digest:
        raise ProtocolError(
            f"version {manifest.version} has digest {manifest.digest}, its files give {digest}; "
            "the run is damaged, continue from an earlier version"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
