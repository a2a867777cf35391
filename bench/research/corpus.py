"""Measures how the weights of runs changed, version by version, as rows of a small data set.

    python -m bench.research.corpus RUN... --trainer fp32|bf16 --into FOLDER

FOLDER gets a file of JSON lines for each run, with a line per version, and README.md, which explains the
fields and summarizes all files of the folder. You can add runs to an existing folder.
"""

import argparse
import json
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.research.measure import About, Row, Step, fp8_scale, row
from delta_weight_sync import DeltaWeightSyncError, RunReader, open_run
from delta_weight_sync.codec import Bits, Delta, Patch, apply
from delta_weight_sync.reader import require_digest
from delta_weight_sync.records import Manifest, RunInfo, parse
from delta_weight_sync.runlog import RunLogReader, StepEvent

_CARD: Final = Path(__file__).with_name("card.md")
_METRIC = "learning_rate"


def main(words: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.research.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls", metavar="RUN", nargs="+", help="<bucket>#<run>, as for delta-weight-sync")
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True, help="folder of the data set")
    parser.add_argument(
        "--trainer", choices=("fp32", "bf16"), required=True, help="with fp32 master weights, or without"
    )
    parser.add_argument("--lr", type=float, metavar="RATE", help="learning rate, if the run's log lacks it")
    arguments = parser.parse_args(words)
    try:
        for url in arguments.urls:
            add(url, arguments.into, trainer=arguments.trainer, lr=arguments.lr)
    except (DeltaWeightSyncError, OSError) as error:
        sys.exit(f"corpus: {error}")


def add(url: str, folder: Path, *, trainer: str, lr: float | None) -> None:
    """Measure every version of a run, and rewrite the folder's card."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = open_run(url)
    manifests = [*reader.versions()][::-1]
    rows = _measured(reader, manifests, trainer, lr)
    if not rows:
        sys.exit(f"corpus: {url} has fewer than two versions, so nothing changed yet")
    path = folder / f"{reader.keys.run}-{manifests[0].seal[:8]}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} versions of {url} are in {path}", flush=True)
    if manifests[0].parent:
        print(f"older versions were deleted; the oldest available is {manifests[0].version}")
    write_card(folder)


def _measured(reader: RunReader, manifests: Sequence[Manifest], trainer: str, lr: float | None) -> list[Row]:
    info = parse(RunInfo, reader.bucket.get(reader.keys.info), reader.keys.info)
    rates = _rates(reader, manifests) if lr is None else dict.fromkeys((m.version for m in manifests), lr)
    about, rows, scales = About(info.model, trainer, rates), list[Row](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        for step in _steps(reader, manifests, Path(folder)):
            scales = scales or {name: fp8_scale(bits) for name, bits in step.before.items()}
            rows.append(row(step, about, scales))
    return rows


def _steps(reader: RunReader, manifests: Sequence[Manifest], folder: Path) -> Iterator[Step]:
    """Each version that a delta leads to, oldest first, proven by its digest.

    `before` changes in place: use it before you ask for the next step.
    """
    state: dict[str, Bits] = {}
    for manifest in manifests:
        if not state or not manifest.delta:
            state = reader.checkout(manifest, folder)
            continue
        shapes = {name: bits.shape for name, bits in state.items()}
        patches = list[Patch]()
        for path in reader.fetch_all(manifest.delta, folder):
            patches += Delta(path).patches(shapes, state.__getitem__)
            path.unlink()
        yield Step(manifest, state, patches)
        for patch in patches:
            apply(patch, state[patch.name])
        require_digest(state, manifest)


def _rates(reader: RunReader, manifests: Sequence[Manifest]) -> dict[int, float]:
    """Version -> the learning rate that was logged last before it was published, if there is one."""
    events = RunLogReader(reader.bucket, reader.keys.run).poll()
    steps = [event for event in events if isinstance(event, StepEvent) and _METRIC in event.metrics]
    times = [step.t for step in steps]
    before = {manifest.version: bisect_right(times, manifest.created_at) for manifest in manifests}
    return {version: steps[count - 1].metrics[_METRIC] for version, count in before.items() if count}


def write_card(folder: Path) -> None:
    """Write README.md of a folder of `.jsonl` files."""
    files = sorted(folder.glob("*.jsonl"))
    runs = [_line([json.loads(row) for row in path.read_text().splitlines()]) for path in files]
    (folder / "README.md").write_text(_CARD.read_text().replace("{runs}", "\n".join(runs)))


def _line(rows: Sequence[Row]) -> str:
    """A run's row of the card's table."""
    last, some = rows[-1], [row for row in rows if row["changed"]]
    rates = sorted({row["lr"] for row in rows} - {None})
    typical = ["–"] * 4
    if some:
        near = median(row["ulps"]["1"] / row["changed"] for row in some)
        limit = median(row["limits"]["by_exponent"] for row in some)
        sizes = [
            median(sum(row["bytes"][e].values()) / row["changed"] for row in some) for e in ("fast", "small")
        ]
        typical = [f"{near:.0%}", f"{limit:.2f}", *(f"{size:.2f}" for size in sizes)]
    cells = [
        last["run"],
        last["model"],
        f"{last['weights'] / 1e6:.3g} M",
        last["trainer"],
        " to ".join(f"{rate:.1e}" for rate in (rates[:1] + rates[1:][-1:])) or "unknown",
        str(len(rows)),
        f"{median(row['density'] for row in rows):.3%}",
        f"{median(row['density_fp8'] for row in rows):.3%}",
        *typical,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
