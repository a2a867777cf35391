"""One run of the study: TRL's trainer, a carrier, and a player that is as far behind as it is told to be.

    python -m trainer.study.run --carrier deltas --lag 4 --seed 0 --steps 60 \\
        --env_url http://127.0.0.1:8000 --out deltas-4-0.jsonl

Writes a line for each step, with the digest of the version that came of it, and one about the whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync.publish import trl_patches
from delta_weight_sync.publish.sharded import Weights
from trainer import held_out, wordle
from trainer.arguments import ScriptArguments
from trainer.norm_rate import NormRateTrainer
from trainer.policies.wordle_tokens import WordleTokens
from trainer.study.carriers import CARRIERS, Sent
from trainer.study.lockstep import Lockstep

POLICY = Path(__file__).parents[1] / "policies" / "wordle-tiny"
_CONFIG = Path(__file__).parents[1] / "configs" / "wordle_tiny.yaml"
_SAID = ("ratio", "kl", "entropy", "loss")  # by TRL of each step


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="One run of the study.")
    parser.add_argument("--carrier", choices=CARRIERS, required=True)
    parser.add_argument("--lag", type=int, required=True, help="how many versions old each batch is")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--env_url", required=True)
    parser.add_argument("--out", type=Path, required=True, help="file to write, when all is done")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the number of cores
    lines = list(train(options))
    unfinished = options.out.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.rename(options.out)


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the run's file."""
    started = time.monotonic()
    trl_patches.install()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        script, args = _settings(options, folder)
        carrier = CARRIERS[options.carrier]((Path(folder) / "bucket").as_uri(), POLICY)
        worker = Lockstep(
            carrier,
            model,
            WordleTokens(tokenizer),
            options.env_url,
            seed=options.seed,
            lag=options.lag,
            groups=args.per_device_train_batch_size // args.num_generations,
            generations=args.num_generations,
        )
        sent: list[Sent] = []
        trained: list[float] = []  # seconds of one core, without those of the games

        def hand_over(weights: Weights, sync: int) -> None:
            sent.append(carrier.send(weights))
            trained.append(time.process_time() - sum(batch.play_s for batch in worker.batches))

        trainer = NormRateTrainer(
            norm_rate=script.norm_learning_rate,
            model=str(POLICY),
            args=args,
            processing_class=tokenizer,
            train_dataset=wordle.make_dataset(script.prompt, 1, options.seed),
            rollout_worker=worker,
            hand_over=hand_over,
        )
        with contextlib.closing(carrier):
            before = held_out.wordle(model, tokenizer, options.env_url)
            trainer.begin()
            after = held_out.wordle(worker.load(options.steps), tokenizer, options.env_url)
    steps = [log for log in trainer.state.log_history if "ratio" in log]
    seconds = [later - earlier for earlier, later in pairwise(trained)]
    done = zip(steps, worker.batches, sent[1:], seconds, strict=False)
    for number, (log, batch, version, train_s) in enumerate(done, 1):
        said = {name: log[name] for name in _SAID}
        yield {"step": number, **vars(batch), **said, **vars(version), "train_s": train_s}
    yield {"before": sum(before), "after": sum(after), "games": len(after), "s": time.monotonic() - started}


def _settings(options: argparse.Namespace, folder: str) -> tuple[ScriptArguments, AsyncGRPOConfig]:
    given = {
        "config": _CONFIG,
        "model": POLICY,
        "bucket": "file:///unused",
        "run": "study",
        "replicas": "none",
        "env_url": options.env_url,
        "output_dir": folder,
        "max_steps": options.steps,
        "max_staleness": options.lag + 1,
        "seed": options.seed,
        "use_cpu": "true",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return TrlParser((ScriptArguments, AsyncGRPOConfig)).parse_args_and_config(words)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
