"""Runs for the corpus: a small checkpoint trained by policy gradient, with master weights and without.

    python -m bench.corpus_runs [CHECKPOINT]

Each run is trained by AdamW from the same weights and seed, on the task of `bench.updates` (answers of many
different tokens), published version by version into a folder, and measured by `delta-weight-sync corpus` into
bench/data/corpus. With fp32 master weights the bf16 cast is published; without, weights and AdamW's memory
are bf16 themselves. CHECKPOINT is a folder; by default it is the shipped Wordle policy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import updates
from bench.results import ROOT
from delta_weight_sync import Publisher
from delta_weight_sync.cli import main as command

FOLDER = ROOT / "bench" / "data" / "corpus"
SHIPPED = ROOT / "trainer" / "policies" / "wordle-tiny"
RATES = (1e-6, 1e-5, 1e-4)
TRAINERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS = 12


def main() -> None:
    """Every run, one after the other."""
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    for trainer in TRAINERS:
        for rate in RATES:
            with tempfile.TemporaryDirectory() as folder:
                url = f"{Path(folder).as_uri()}#{base.name}-{trainer}-{rate:.0e}"
                train(url, base, trainer, rate)
                command(["corpus", url, "--trainer", trainer, "--lr", str(rate), "--into", str(FOLDER)])


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


if __name__ == "__main__":
    main()
