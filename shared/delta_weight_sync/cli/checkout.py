"""`delta-weight-sync checkout RUN [--version N] --out FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from delta_weight_sync.cli.which import add_run, add_version, opened


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    add_version(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder to write")


def run(arguments: argparse.Namespace) -> None:
    """Write the version; its digest was checked before its weights are there."""
    reader = opened(arguments)
    manifest = reader.at(arguments.version)
    reader.checkout(manifest, arguments.out)
    print(f"version {manifest.version} (digest {manifest.digest}) is in {arguments.out}")
