"""Asynchronous GRPO whose only link to its vLLM replicas is a bucket.

    python -m trainer.train --config trainer/configs/wordle_tiny.yaml --bucket hf://buckets/me/wordle \\
        --run first --replicas https://me-vllm.hf.space --env_url https://me-wordle.hf.space

The story: load the policy, open the run in the bucket, publish the policy as version 0, wait until a replica
serves it, then let TRL train. Rollouts come from the replicas over HTTPS; after every optimizer step the
changed weights go to the bucket, and the replicas take them from there in their own time.

For several processes write `accelerate launch --use_fsdp --fsdp_version 2 -m` in place of `python -m`. Then
only the main process meets bucket and replicas; the others compute, and tell it what changed in their shards.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync.codec import Encoding
from delta_weight_sync.protocol import ProtocolError
from delta_weight_sync.publish import trl_compat
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.run_writer import FencedError, RunWriter
from delta_weight_sync.publish.sharded import PeerError, Peers, live_digest
from delta_weight_sync.publish.weight_transfer import WeightTransfer, to_bucket, to_main
from delta_weight_sync.runlog import DoneEvent, RunLogWriter
from delta_weight_sync.store import BucketError, open_bucket
from trainer import rollouts, shorter, wordle
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.observer import ReplicaWatch, StepRecorder


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
    encoding: str = field(default="fast", metadata={"help": "Of deltas: 'fast', 'small' or 'original'."})
    mirror: str = field(
        default="host", metadata={"help": "Where the published bits are kept: 'host' or 'device'."}
    )

    def __post_init__(self) -> None:
        for option, known in (("encoding", get_args(Encoding)), ("mirror", get_args(Place))):
            if (value := getattr(self, option)) not in known:
                raise SystemExit(f"--{option} must be one of {', '.join(known)}; it is {value!r}")


_FAULTS = (BucketError, ProtocolError, FencedError, PeerError, SpacesUnavailableError)


def main() -> None:
    """Parse, train, and leave the run in the bucket complete; a fault of the world is one sentence."""
    script, args = TrlParser((ScriptArguments, AsyncGRPOConfig)).parse_args_and_config()
    try:
        train(script, args)
    except _FAULTS as error:
        sys.exit(f"trainer: {error}")


def train(script: ScriptArguments, args: AsyncGRPOConfig) -> None:
    """One run from the base policy to the last version."""
    if args.token_budget is None:  # TRL would ask a replica, which starts once version 0 is published
        raise SystemExit(
            "--token_budget is needed: the most tokens of a sample, prompt and answers; see configs/"
        )
    trl_compat.install(flash_attention=torch.cuda.is_available() and args.dtype != "float32")
    peers = Peers()
    task = make_task(script, args)
    tokenizer = AutoTokenizer.from_pretrained(script.model)

    with contextlib.ExitStack() as stack:
        with peers.together():
            run = stack.enter_context(_open_run(script, args, tokenizer, task, peers)) if peers.main else None
        recorder = StepRecorder(run.log) if run else None
        trainer = trl_compat.BucketGRPOTrainer(
            model=script.model,
            args=args,
            processing_class=tokenizer,
            train_dataset=task.dataset,
            reward_funcs=task.reward_funcs,
            environment_factory=task.environment,
            rollout_worker=run.worker if run else None,
            weight_transfer=run.transfer if run else to_main(peers, script.mirror),
            callbacks=[recorder] if recorder else [],
        )
        if recorder:
            trainer.rollout_queue = recorder.watch(trainer.rollout_queue)
        trainer.add_callback(_LastSync(trainer))
        trainer.train()
        digest = live_digest(trainer.weights(), peers)
        if run:
            run.finish(digest)


@dataclass(frozen=True)
class Task:
    """What is trained on."""

    dataset: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    environment: Callable[[], object] | None


def make_task(script: ScriptArguments, args: AsyncGRPOConfig) -> Task:
    """The task of the settings."""
    if script.task == "shorter":
        return Task(shorter.make_dataset(), [shorter.reward_shorter], None)
    if script.task != "wordle" or not script.env_url:
        raise SystemExit(
            "--task must be 'shorter', or 'wordle' together with --env_url <URL of the Wordle Space>"
        )
    games = args.max_steps * args.per_device_train_batch_size * args.world_size // args.num_generations
    dataset = wordle.make_dataset(script.prompt, max(games, 1), args.seed)
    return Task(dataset, [], functools.partial(wordle.WordleEnv, script.env_url))


@dataclass(frozen=True)
class OpenRun:
    """What only the main process has: the way into the bucket, and to the replicas."""

    log: RunLogWriter
    publisher: Publisher
    watch: ReplicaWatch
    transfer: WeightTransfer
    worker: rollouts.ReplicaRolloutWorker

    def finish(self, digest: str) -> None:
        """Publish the rest, note the digest of the live weights, see the replicas take the last version."""
        manifest = self.publisher.flush()
        self.log.append(DoneEvent(t=time.time(), version=manifest.version, digest=digest))
        self.watch.wait_for(manifest.version)
        print(f"published version {manifest.version}, digest {digest}", flush=True)


@contextlib.contextmanager
def _open_run(
    script: ScriptArguments,
    args: AsyncGRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    peers: Peers,
) -> Iterator[OpenRun]:
    spaces = ColdSpaces(script.replicas, script.env_url)
    spaces.knock()
    bucket = open_bucket(script.bucket, create=True)
    with contextlib.ExitStack() as stack:
        assets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _save_assets(script.model, tokenizer, assets)
        writer = RunWriter(bucket, script.run, model=_public_name(script.model), assets=assets)
        log = stack.enter_context(contextlib.closing(RunLogWriter(bucket, script.run)))
        watch = stack.enter_context(contextlib.closing(ReplicaWatch(script.replicas, log)))
        publisher = stack.enter_context(
            contextlib.closing(Publisher(writer, log, level=script.encoding, mirror=script.mirror))
        )
        worker = rollouts.make_worker(
            args,
            tokenizer,
            task.dataset,
            script.replicas,
            writer.writer_term,
            reward_funcs=task.reward_funcs,
            environment_factory=task.environment,
        )
        yield OpenRun(log, publisher, watch, to_bucket(publisher, spaces.wait, peers), worker)


class _LastSync(TrainerCallback):
    """Publishes the last steps of a run whose length is not a multiple of `weight_sync_steps`."""

    def __init__(self, trainer: trl_compat.BucketGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_end(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.weight_sync_steps:
            self._trainer._sync_weight()


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
