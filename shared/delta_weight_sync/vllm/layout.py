"""Versions as checkpoints on this machine's disk, where vLLM and its workers read them.

The anchor stays here, so that healing and going back fetch at most some deltas. A version is a copy of it
into which deltas are written; all workers map the same pages. What it holds is proven when it is committed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.history import apply_delta, leave_only, reading
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import AnchorRef, ProtocolError
from delta_weight_sync.vllm.progress import CountingReader

Shapes = dict[str, list[int]]
_COMING = "coming"


class Layout:
    """One anchor and one version below `folder`."""

    def __init__(self, reader: CountingReader, folder: Path) -> None:
        self._reader, self._anchors, self._version = reader, folder / "anchors", folder / "checkpoint"
        self._remove_leftovers(folder)

    def _remove_leftovers(self, folder: Path) -> None:
        """What a process that was killed had begun: deltas, downloads, a version. What is whole stays."""
        parts = (*folder.glob(".*.part"), *self._anchors.rglob(".*.part"))
        for left in (*parts, *folder.glob("*.safetensors")):
            left.unlink()
        shutil.rmtree(self._version, ignore_errors=True)

    def put(self, manifest: Manifest) -> tuple[Path, Shapes]:
        """The folder that holds `manifest`'s version, and the shapes of its tensors."""
        anchor = self._anchor(manifest)
        shutil.rmtree(self._version, ignore_errors=True)
        shutil.copytree(anchor, self._version)
        with reading(manifest.anchor):
            state = map_bits(self._version / WEIGHTS, "r+")
        for ref in self._reader.way(manifest).deltas:
            delta = self._reader.fetch(ref, self._version)
            apply_delta(state, delta)
            delta.unlink()
        return self._version, {name: list(bits.shape) for name, bits in state.items()}

    def _anchor(self, manifest: Manifest) -> Path:
        """Its folder is named by its content, and is there when it is whole; it may be damaged since.

        Of one that could not be fetched, the files that are whole stay for the next try.
        """
        weights = next((ref for ref in manifest.anchor.files if ref.name == WEIGHTS), None)
        if weights is None:
            raise ProtocolError(f"the anchor of version {manifest.anchor.version} has no {WEIGHTS}")
        kept, coming = self._anchors / weights.sha256, self._anchors / _COMING
        if not _holds(kept, manifest.anchor):
            if kept.exists():
                shutil.rmtree(coming, ignore_errors=True)
                kept.rename(coming)
            self._fetch(manifest.anchor, coming)
            coming.rename(kept)
        return kept

    def _fetch(self, anchor: AnchorRef, coming: Path) -> None:
        """The disk may have no place for two: another anchor is there until only weights are wanted."""
        leave_only(coming, anchor)
        for ref in anchor.small_first():
            if ref.name == WEIGHTS:
                self._remove_others(coming)
            self._reader.fetch(ref, coming)

    def _remove_others(self, coming: Path) -> None:
        for folder in self._anchors.iterdir():
            if folder != coming:
                shutil.rmtree(folder)

    def done(self) -> None:
        """The version is live: its weights are not needed any more."""
        (self._version / WEIGHTS).unlink()


def _holds(folder: Path, anchor: AnchorRef) -> bool:
    """Whether the files of `anchor` are there as they were published."""
    return all((path := folder / ref.name).is_file() and ref.is_in(path) for ref in anchor.files)
