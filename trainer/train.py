"""Asynchronous GRPO whose only link to its vLLM replicas is a bucket.

    python -m trainer.train --config trainer/configs/wordle_tiny.yaml --bucket hf://buckets/me/wordle \\
        --run first --replicas https://me-vllm.hf.space --env_url https://me-wordle.hf.space

The story: load the policy, open the run in the bucket, publish the policy as version 0, wait until a replica
serves it, then let TRL train. Rollouts come from the replicas over HTTPS; after every optimizer step the
changed weights go to the bucket, and the replicas take them from there in their own time.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from shared.bucket import BucketError
from shared.buckets import open_bucket
from shared.checkpoint import to_bits
from shared.digest import state_digest, to_hex
from shared.protocol import ProtocolError
from shared.runlog import DoneEvent, RunLogWriter
from trainer import rollouts, shorter, trl_compat, wordle
from trainer.observer import ReplicaWatch, StepRecorder
from trainer.publisher import Publisher
from trainer.run_writer import FencedError, RunWriter
from trainer.weight_transfer import BucketWeightTransfer


@dataclass(frozen=True)
class ScriptArguments:
    """Where everything is. All of it is URLs and names; nothing is shared but these."""

    model: str = field(metadata={"help": "The base policy: a Hub id or the folder of a checkpoint."})
    bucket: str = field(
        metadata={"help": "hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>"}
    )
    run: str = field(metadata={"help": "Name of the run; its objects are below runs/<run>/ in the bucket."})
    replicas: list[str] = field(metadata={"help": "URLs of the vLLM Spaces."})
    task: str = field(default="wordle", metadata={"help": "'wordle' or 'shorter'."})
    env_url: str = field(default="", metadata={"help": "URL of the Wordle Space (task 'wordle')."})
    prompt: str = field(default=wordle.PROMPT, metadata={"help": "What the policy is told (task 'wordle')."})


def main() -> None:
    """Parse, train, and leave the run in the bucket complete; a fault of the world is one sentence."""
    script, args = TrlParser((ScriptArguments, AsyncGRPOConfig)).parse_args_and_config()
    try:
        train(script, args)
    except (BucketError, ProtocolError, FencedError, rollouts.ReplicasUnavailableError) as error:
        sys.exit(f"trainer: {error}")


def train(script: ScriptArguments, args: AsyncGRPOConfig) -> None:
    """One run from the base policy to the last version."""
    trl_compat.install(flash_attention=torch.cuda.is_available() and args.dtype != "float32")
    bucket = open_bucket(script.bucket, create=True)
    log = RunLogWriter(bucket, script.run)
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    dataset, reward_funcs, environment = _task(script, args)

    with tempfile.TemporaryDirectory() as assets:
        _save_assets(script.model, tokenizer, Path(assets))
        writer = RunWriter(bucket, script.run, model=_public_name(script.model), assets=Path(assets))
        publisher = Publisher(writer, log)
        watch = ReplicaWatch(script.replicas, log)
        transfer = BucketWeightTransfer(
            publisher, after_first=functools.partial(rollouts.wait_for_replica, script.replicas)
        )
        worker = rollouts.make_worker(
            args,
            tokenizer,
            dataset,
            script.replicas,
            writer.epoch,
            reward_funcs=reward_funcs,
            environment_factory=environment,
        )
        trainer = AsyncGRPOTrainer(
            model=script.model,
            args=args,
            processing_class=tokenizer,
            train_dataset=dataset,
            reward_funcs=reward_funcs,
            environment_factory=environment,
            rollout_worker=worker,
            weight_transfer=transfer,
            callbacks=[StepRecorder(log)],
        )
        trainer.add_callback(_LastSync(trainer))
        try:
            trainer.train()
            manifest = publisher.flush()
            digest = live_digest(trainer)
            log.append(DoneEvent(t=time.time(), version=manifest.version, digest=digest))
            watch.wait_for(manifest.version)
            print(f"published version {manifest.version}, digest {digest}", flush=True)
        finally:
            publisher.close()
            watch.close()
            log.close()


def live_digest(trainer: AsyncGRPOTrainer) -> str:
    """Digest of the trainer's live parameters, cast to bf16: what the replicas must hold in the end."""
    weights = trainer._streaming_iter()
    return to_hex(state_digest({name: to_bits(tensor) for name, tensor in weights}))


class _LastSync(TrainerCallback):
    """Publishes the last steps of a run whose length is not a multiple of `weight_sync_steps`."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_end(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.weight_sync_steps:
            self._trainer._sync_weight()


def _task(
    script: ScriptArguments, args: AsyncGRPOConfig
) -> tuple[Dataset, list[Callable[..., list[float]]], Callable[[], object] | None]:
    """Dataset, reward functions and environment of the task."""
    if script.task == "shorter":
        return shorter.make_dataset(), [shorter.reward_shorter], None
    if script.task != "wordle" or not script.env_url:
        raise SystemExit(
            "--task must be 'shorter', or 'wordle' together with --env_url <URL of the Wordle Space>"
        )
    games = args.max_steps * args.per_device_train_batch_size // args.num_generations
    dataset = wordle.make_dataset(script.prompt, max(games, 1), args.seed)
    return dataset, [], functools.partial(wordle.WordleEnv, script.env_url)


def _public_name(model: str) -> str:
    """What the run calls its base: a Hub id as it is, of a local folder only the name."""
    return Path(model).name if Path(model).is_dir() else model


def _save_assets(model: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The files beside the weights that make a version an ordinary Hugging Face checkpoint."""
    config = AutoConfig.from_pretrained(model)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_pretrained(model).save_pretrained(folder)


if __name__ == "__main__":
    main()
