"""Trains and measures the runs of bench/data/corpus, and draws docs/corpus.svg from all that are there.

    python -m bench.research.corpus_runs [--draw] [CHECKPOINT]

A small checkpoint is trained by policy gradient, with fp32 master weights and without. AdamW trains each run
from the same weights and seed, on the task of `bench.updates` (answers of many different tokens). With master
weights the run publishes their bf16 cast; without them weights and AdamW's moments are bf16, too. CHECKPOINT
is a folder (default: the Wordle policy of this repository). `--draw` only draws.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import updates
from bench.plots import STYLE, save
from bench.research import corpus
from bench.results import ROOT
from delta_weight_sync import Publisher

FOLDER = ROOT / "bench" / "data" / "corpus"
SHIPPED = ROOT / "trainer" / "policies" / "wordle-tiny"
RATES = (1e-6, 1e-5, 1e-4)
TRAINERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS = 12
Run = list[dict[str, Any]]
_COLOURS = {"fp32": ("fp32 master weights", "#0969da"), "bf16": ("bf16 weights only", "#bf8700")}
_SHARES = {"density": ("bf16", "-", "full"), "density_fp8": ("the same in FP8", ":", "none")}


def main() -> None:
    """Train and measure every run, one after the other, then draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.research.corpus_runs")
    parser.add_argument("base", metavar="CHECKPOINT", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    for trainer in () if arguments.draw else TRAINERS:
        for rate in RATES:
            with tempfile.TemporaryDirectory() as folder:
                url = f"{Path(folder).as_uri()}#{arguments.base.name}-{trainer}-{rate:.0e}"
                train(url, arguments.base, trainer, rate)
                corpus.add(url, FOLDER, trainer=trainer, lr=rate)
    draw()


def train(url: str, base: Path, trainer: str, rate: float) -> None:
    """Publish a run of `STEPS` versions after the first."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=TRAINERS[trainer])
    tokenizer = AutoTokenizer.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    with Publisher(url, base) as publisher:
        publisher.publish(model.named_parameters(), 0)
        for step in range(1, STEPS + 1):
            updates.loss(model, tokenizer, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model.named_parameters(), step)
            publisher.flush()


def draw() -> None:
    """Draw docs/corpus.svg."""
    runs = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(FOLDER.glob("*.jsonl"))
    ]
    with mpl.rc_context(STYLE):
        save("corpus", _paint, [run for run in runs if run[0]["lr"]])


def _paint(axes: Axes, runs: list[Run]) -> None:
    for model in sorted({run[0]["model"] for run in runs}):
        for trainer, (words, colour) in _COLOURS.items():
            some = [run for run in runs if (run[0]["model"], run[0]["trainer"]) == (model, trainer)]
            some.sort(key=_rate)
            for share, (kind, line, filled) in _SHARES.items():
                shares = [100 * median(row[share] for row in run) for run in some]
                look = {"marker": "o", "fillstyle": filled, "color": colour}
                axes.plot([*map(_rate, some)], shares, line, label=f"{model}, {words}, {kind}", **look)
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="weights changed per version, %")


def _rate(run: Run) -> float:
    return float(median(row["lr"] for row in run))


if __name__ == "__main__":
    main()
