"""`delta-weight-sync show RUN [--version N]`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from delta_weight_sync.cli.terminal import payload
from delta_weight_sync.cli.which import add_run, add_version, opened
from delta_weight_sync.codec import Delta
from delta_weight_sync.errors import printable
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    add_version(parser)


def run(arguments: argparse.Namespace) -> None:
    """The facts of one version as JSON, then the tensors that its delta changes."""
    reader = opened(arguments)
    manifest = reader.at(arguments.version)
    print(json.dumps(_facts(manifest), indent=2))
    if manifest.deltas:
        _show_tensors(reader, manifest)


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "run": manifest.run,
        "version": manifest.version,
        "digest": manifest.digest,
        "payload_bytes": payload(manifest),
        "full_bytes": manifest.full_bytes,
        "changed": manifest.changed,
        "total": manifest.total,
        "sparsity": round(manifest.sparsity, 6),
        "anchor": manifest.anchor.version,
        "way": [file.key for file in manifest.way().files],
    }


def _show_tensors(reader: RunReader, manifest: Manifest) -> None:
    with tempfile.TemporaryDirectory() as folder:
        delta = Delta(reader.fetch(manifest.deltas[-1], Path(folder)))
    for number, group in enumerate(delta.groups):
        print(f"group {number}, {printable(group.explain())}")
    print(f"{'changed':>10}  {'of':>12}  {'group':>5}  tensor")
    for tensor in delta.tensors:
        name = printable(tensor.name)
        print(f"{tensor.changes:10,}  {tensor.numel:12,}  {tensor.group:5}  {name} {list(tensor.shape)}")
