"""`delta-weight-sync verify RUN`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from delta_weight_sync import checkpoint
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.cli.which import add_run, opened, versions
from delta_weight_sync.history import RunReader, require_digest
from delta_weight_sync.protocol import Manifest


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> None:
    """Rebuild every version, oldest first; the first that is not what was published ends it."""
    reader = opened(arguments)
    reader.require_sound()
    manifests = sorted(versions(reader), key=lambda manifest: manifest.version)
    for manifest in _replay(reader, manifests):
        print(f"version {manifest.version} ok, digest {manifest.digest}", flush=True)
    print(f"all {len(manifests)} versions verified")


def _replay(reader: RunReader, manifests: list[Manifest]) -> Iterator[Manifest]:
    state: dict[str, Bits] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for manifest in manifests:
            if manifest.deltas:
                reader.advance(state, manifest.deltas[-1], folder)
            if manifest.anchor.version == manifest.version:
                _check_anchor(reader, manifest, folder)
            if not manifest.deltas:
                state = dict(checkpoint.read_bits(folder))
            require_digest(state, manifest)
            yield manifest


def _check_anchor(reader: RunReader, manifest: Manifest, folder: Path) -> None:
    for ref in manifest.anchor.files:
        reader.fetch(ref, folder)
    require_digest(dict(checkpoint.read_bits(folder)), manifest)
