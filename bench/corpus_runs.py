"""Runs for the corpus that can be had anywhere: SmolLM2-135M by policy gradient, with and without masters.

    python -m bench.corpus_runs

Each run is trained by AdamW from the same weights and seed (see `bench.updates` for its task), published
version by version into a folder, and measured by `delta-weight-sync corpus` into bench/data/corpus. With fp32
master weights the bf16 cast is published; without, weights and AdamW's memory are bf16 themselves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench import updates
from bench.results import ROOT
from delta_weight_sync import Publisher
from delta_weight_sync.cli import main as command

FOLDER = ROOT / "bench" / "data" / "corpus"
RATES = (1e-6, 3e-6, 1e-5)
TRAINERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS = 12


def main() -> None:
    """Every run, one after the other: a bucket takes as much room as a few checkpoints."""
    for trainer in TRAINERS:
        for rate in RATES:
            with tempfile.TemporaryDirectory() as folder:
                url = f"{Path(folder).as_uri()}#smollm2-{trainer}-{rate:.0e}"
                train(url, trainer, rate)
                command(["corpus", url, "--trainer", trainer, "--lr", str(rate), "--into", str(FOLDER)])


def train(url: str, trainer: str, rate: float) -> None:
    """Publish a run of `STEPS` versions after the first."""
    torch.manual_seed(4)
    model = updates.policy().to(TRAINERS[trainer])
    tokenizer = AutoTokenizer.from_pretrained(updates.source())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    with Publisher(url, updates.source()) as publisher:
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
