"""`delta-weight-sync blame RUN VERSION`: the tensors that changed most at one version."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.cli.which import add_run, opened
from delta_weight_sync.codec import Patch
from delta_weight_sync.corpus.ulps import CLASSES, histogram
from delta_weight_sync.corpus.versions import patches_of
from delta_weight_sync.errors import printable

_EPILOG = """\
Of each tensor: how many of its weights changed, which share of it that is, and how many of them moved by how
many units of the last place of bf16. Beside another version of the run a wrong one stands out: a tensor that
changed as a whole, or weights that moved far."""
_ROWS: Final = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    parser.add_argument("version", type=int, metavar="VERSION", help="its number")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """A line for each of the tensors that changed most."""
    reader = opened(arguments)
    manifest = reader.find(arguments.version)
    with tempfile.TemporaryDirectory() as folder:
        tensors = sorted(map(_row, patches_of(reader, manifest, Path(folder))), reverse=True)
    changed = f"{manifest.changed:,} weights of {manifest.total:,}, {100 * (1 - manifest.sparsity):.3f} %"
    print(f"version {manifest.version} changed {changed}")
    if tensors:
        print(
            f"{'changed':>10}  {'share':>8}  {'ULPs':>10}{''.join(f'{c:>10}' for c in CLASSES[1:])}  tensor"
        )
    for row in tensors[:_ROWS]:
        print(row)
    if len(tensors) > _ROWS:
        print(f"{len(tensors) - _ROWS} more changed, each a smaller share of it")


class _Row(NamedTuple):
    """A tensor; rows sort by the share of it that changed, then by how many weights that are."""

    share: float
    changed: int
    name: str
    shape: tuple[int, ...]
    moved: NDArray[np.int64]  # changes in each of `CLASSES`

    def __str__(self) -> str:
        counts = "".join(f"{count:>10,}" for count in self.moved)
        share, name = f"{100 * self.share:.3f} %", f"{printable(self.name)} {list(self.shape)}"
        return f"{self.changed:>10,}  {share:>8}  {counts}  {name}"


def _row(patch: Patch) -> _Row:
    changed = patch.index.size
    return _Row(changed / patch.numel, changed, patch.name, patch.shape, histogram(patch.ulps))
