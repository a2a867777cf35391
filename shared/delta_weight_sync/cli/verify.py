"""`delta-weight-sync verify RUN`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from delta_weight_sync import checkpoint
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.cli.which import add_run, deleted, opened, versions
from delta_weight_sync.history import RunReader, reading, require_digest
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import AnchorRef, DeltaRef


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> None:
    """Rebuild every version, oldest first; the first that is not what was published ends it."""
    reader = opened(arguments)
    reader.require_sound()
    manifests = sorted(versions(reader), key=lambda manifest: manifest.version)
    with tempfile.TemporaryDirectory() as folder:
        for manifest in _Proof(reader, manifests, Path(folder)).versions():
            print(f"version {manifest.version} ok, digest {manifest.digest}", flush=True)
    if said := deleted(manifests[0]):
        print(said)
    print(f"all {len(manifests)} versions verified")


class _Proof:
    """Goes from version to version by their own deltas, and proves every anchor and jump on the way."""

    def __init__(self, reader: RunReader, manifests: list[Manifest], folder: Path) -> None:
        self._reader, self._manifests, self._folder = reader, manifests, folder
        self._by_version = {manifest.version: manifest for manifest in manifests}
        self._anchors = {manifest.anchor.version: manifest.anchor for manifest in manifests}
        taken = (delta for manifest in manifests for delta in manifest.way().deltas)
        shortcuts = {delta.key: delta for delta in (*taken, *manifests[-1].jumps)}
        self._jumps = [jump for jump in shortcuts.values() if jump.version - jump.base > 1]

    def versions(self) -> Iterator[Manifest]:
        """Each version after it was proven; the oldest and the newest are built as a joining replica does."""
        state: dict[str, Bits] = {}
        for manifest in self._manifests:
            if state and manifest.deltas:
                self._reader.advance(state, manifest.deltas[-1], self._folder)
                require_digest(state, manifest)
            else:
                state = self._reader.checkout(manifest, self._folder)
            self._prove_shortcuts(manifest, state)
            yield manifest
        self._reader.checkout(self._manifests[-1], self._folder)

    def _prove_shortcuts(self, manifest: Manifest, state: dict[str, Bits]) -> None:
        if anchor := self._anchors.get(manifest.version):
            self._prove_anchor(anchor, manifest)
        for jump in self._jumps:
            if jump.base == manifest.version:
                self._prove_jump(jump, state)

    def _prove_anchor(self, anchor: AnchorRef, manifest: Manifest) -> None:
        for ref in anchor.files:
            self._reader.fetch(ref, self._folder)
        with reading(anchor):
            bits = checkpoint.map_bits(self._folder / checkpoint.WEIGHTS)
        require_digest(bits, manifest)

    def _prove_jump(self, jump: DeltaRef, state: dict[str, Bits]) -> None:
        there = {name: bits.copy() for name, bits in state.items()}
        self._reader.advance(there, jump, self._folder)
        require_digest(there, self._by_version[jump.version])
