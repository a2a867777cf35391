"""`delta-weight-sync log RUN`."""

from __future__ import annotations

import argparse

from delta_weight_sync.cli.terminal import payload, utc
from delta_weight_sync.cli.which import add_run, deleted, opened, versions
from delta_weight_sync.protocol import Manifest

_TITLES = f"{'version':>7}  {'published':19}  {'payload':>12}  {'changed':>9}  digest            anchor"


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> None:
    """A line for each version, newest first."""
    manifests = versions(opened(arguments))
    manifest = next(manifests)  # so that a run without versions gets a sentence, and no titles
    print(_TITLES, _line(manifest), sep="\n")
    for manifest in manifests:
        print(_line(manifest))
    if said := deleted(manifest):
        print(said)


def _line(manifest: Manifest) -> str:
    anchor = "yes" if manifest.anchor.version == manifest.version else ""
    share = f"{100 * (1 - manifest.sparsity):.3f} %"
    return (
        f"{manifest.version:7}  {utc(manifest.created_at)}  {payload(manifest):12,}  {share:>9}"
        f"  {manifest.digest}  {anchor}"
    )
