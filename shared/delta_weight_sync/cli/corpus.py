"""`delta-weight-sync corpus RUN... --trainer fp32|bf16 --into FOLDER`: how the weights of runs changed."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from delta_weight_sync.cli.which import deleted, versions
from delta_weight_sync.corpus import card
from delta_weight_sync.corpus.rates import rates
from delta_weight_sync.corpus.rows import About, Row, row, scales_of
from delta_weight_sync.corpus.versions import NoDeltaError, steps
from delta_weight_sync.errors import printable
from delta_weight_sync.history import RunReader, open_run
from delta_weight_sync.protocol import Manifest, RunInfo, parse

_EPILOG = """\
FOLDER gets a file of JSON lines for each run, a line per version, and README.md, which says what the fields
are and sums up all files that are there. Whoever adds a run to such a folder measures it in the same way."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    parser.add_argument("urls", metavar="RUN", nargs="+", help="as for the other commands, <bucket>#<run>")
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True, help="of the data set")
    parser.add_argument(
        "--trainer", choices=("fp32", "bf16"), required=True, help="with fp32 master weights, or without"
    )
    parser.add_argument(
        "--lr", type=float, metavar="RATE", help="the learning rate, where the run's log does not say it"
    )
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Measure every version of every run, and write the card anew."""
    arguments.into.mkdir(parents=True, exist_ok=True)
    for url in arguments.urls:
        reader = open_run(url)
        manifests = sorted(versions(reader), key=lambda manifest: manifest.version)
        rows = _measured(reader, manifests, arguments.trainer, arguments.lr)
        if not rows:
            raise NoDeltaError(f"{url} has one version only: nothing changed yet")
        path = arguments.into / f"{reader.keys.run}-{manifests[0].seal[:8]}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} versions of {printable(url)} are in {path}", flush=True)
        if said := deleted(manifests[0]):
            print(said)
    card.write(arguments.into)


def _measured(reader: RunReader, manifests: list[Manifest], trainer: str, lr: float | None) -> list[Row]:
    info = parse(RunInfo, reader.bucket.get(reader.keys.info), reader.keys.info)
    known = rates(reader, manifests) if lr is None else dict.fromkeys((m.version for m in manifests), lr)
    about, rows, scales = About(info.model, trainer, known), list[Row](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(reader, manifests, Path(folder)):
            scales = scales or scales_of(step.before)
            rows.append(row(step, about, scales))
    return rows
