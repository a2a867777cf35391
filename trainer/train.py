"""Asynchronous GRPO whose only link to its vLLM replicas is a bucket.

    python -m trainer.train --config trainer/configs/wordle_tiny.yaml --bucket hf://buckets/me/wordle \\
        --run first --replicas https://me-vllm.hf.space --env_url https://me-wordle.hf.space

The story: load the policy, open the run in the bucket, publish the policy as version 0, wait until a replica
serves it, then let TRL train. Rollouts come from the replicas over HTTPS; after every optimizer step the
changed weights go to the bucket, and the replicas take them from there in their own time. Now and then the
rest of the trainer's state goes there too: however it ends, the same command goes on from it.

For several processes write `accelerate launch --use_fsdp --fsdp_version 2 -m` in place of `python -m`. Then
only the main process publishes and meets replicas; the others compute, tell it what changed in their shards,
and keep their part of the state.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer, TrainerCallback
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import DeltaWeightSyncError, Publisher
from delta_weight_sync.publish import trl_patches
from delta_weight_sync.publish.sharded import Peers, Weights
from delta_weight_sync.publish.trl_trainer import BucketGRPOTrainer, Progress
from delta_weight_sync.runlog import DoneEvent
from trainer import canary, exact, rising, rollouts
from trainer.arguments import ScriptArguments
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.ending import Ending
from trainer.norm_rate import NormRateTrainer
from trainer.observer import ReplicaWatch, StepRecorder
from trainer.pokes import Pokes
from trainer.tasks import Task, make_task
from trainer.time_limit import TimeLimit


def main() -> None:
    """Parse, train, and leave the run in the bucket complete; a fault of the world is one sentence."""
    logging.basicConfig(format="%(name)s: %(message)s")
    script, args = TrlParser((ScriptArguments, AsyncGRPOConfig)).parse_args_and_config()
    try:
        train(script, args)
    except (DeltaWeightSyncError, SpacesUnavailableError) as error:
        sys.exit(f"trainer: {error}")
    except KeyboardInterrupt as request:
        print("trainer: stopped; the same command goes on from what is in the bucket", flush=True)
        sys.exit(128 + (request.args[0] if request.args else signal.SIGINT))


def train(script: ScriptArguments, args: AsyncGRPOConfig) -> None:
    """One run from the base policy to the last version."""
    if args.token_budget is None:  # TRL would ask a replica, which starts once version 0 is published
        raise SystemExit(
            "--token_budget is needed: the most tokens of a sample, prompt and answers; see configs/"
        )
    trl_patches.install()
    limit = TimeLimit(script.minutes, alone=args.world_size == 1)
    task, peers = make_task(script, args), Peers()
    spaces = ColdSpaces(script.replicas, script.env_url)
    with peers.together():
        if peers.main:
            spaces.knock()

    with contextlib.ExitStack() as stack:
        ending = stack.enter_context(Ending(alone=args.world_size == 1))
        publisher = stack.enter_context(open_run(script, peers))
        begun = rising.progress(publisher, fresh=script.fresh)
        if begun and 0 < args.max_steps <= begun.trainer["global_step"]:
            print(f"trained to step {args.max_steps} already: raise --max_steps, or begin again with --fresh")
            return
        watch = ReplicaWatch(script.replicas, publisher.log) if publisher.log else None
        if watch:
            stack.enter_context(contextlib.closing(watch))
        if publisher.run:
            publisher.run.on_version = stack.enter_context(contextlib.closing(Pokes(script.replicas))).send
        worker = make_worker(script, args, task, publisher, begun)
        met = threading.Event()

        def hand_over(weights: Weights, sync: int) -> None:
            publisher.publish(weights, sync)
            if worker:
                worker.inherit(publisher.agreed)
            if not met.is_set():  # now there is a version that the replicas can start with
                met.set()
                with peers.together():
                    if peers.main:
                        spaces.wait()

        looks = canary.beside(publisher, watch, script.model, task.dataset, script.canary_s)
        looking = stack.enter_context(looks)
        trainer = make_trainer(script, args, task, publisher, worker, hand_over, begun)
        trainer.add_callback(limit)
        trainer.add_callback(_LastSync(trainer, ending))
        trainer.add_callback(keep := rising.Keep(publisher, trainer, script.state_every))
        trainer.add_callback(ending)
        with ending.heard():
            trainer.begin()
        if ending.signal:
            sys.exit(leave(publisher, keep, ending))
        digest, newest = publisher.digest(trainer.weights()), publisher.flush()
        keep.keep()
        if publisher.log and watch:
            publisher.log.append(
                DoneEvent(
                    t=time.time(),
                    version=newest.version,
                    digest=digest,
                    stopped_by="time" if limit.over else "steps",
                )
            )
            watch.wait_for(newest.version)
            if looking:
                looking.look()
            print(f"published version {newest.version}, digest {digest}", flush=True)


def leave(publisher: Publisher, keep: rising.Keep, ending: Ending) -> int:
    """Publish what is pending, and keep the state, in the time that is left; returns the exit code."""
    try:
        newest = publisher.flush(ending.left_s)
        keep.keep()
        publisher.flush(ending.left_s)
        news = f"version {newest.version} is published and the state is kept"
    except (DeltaWeightSyncError, TimeoutError) as error:
        news = f"not everything is in the bucket ({error})"
    if publisher.run:
        print(f"trainer: {ending.name}: {news}; the same command goes on from there", flush=True)
    return 128 + ending.signal


def open_run(script: ScriptArguments, peers: Peers) -> Publisher:
    """Of all processes; only the main one of them is the run's writer."""
    url = f"{script.bucket}#{script.run}"
    return Publisher(
        url,
        script.model,
        encoding=script.encoding,
        mirror=script.mirror,
        keep=script.keep or None,
        peers=peers,
    )


def make_worker(
    script: ScriptArguments, args: AsyncGRPOConfig, task: Task, publisher: Publisher, begun: Progress | None
) -> rollouts.ReplicaRolloutWorker | None:
    """What gets samples from the replicas; the main process alone has it."""
    if publisher.run is None:
        return None
    return rollouts.make_worker(
        args,
        AutoTokenizer.from_pretrained(script.model),
        task.dataset,
        script.replicas,
        publisher.run.writer_term,
        begun=begun,
        reward_funcs=task.reward_funcs,
        environment_factory=task.environment,
    )


def make_trainer(
    script: ScriptArguments,
    args: AsyncGRPOConfig,
    task: Task,
    publisher: Publisher,
    worker: rollouts.ReplicaRolloutWorker | None,
    hand_over: Callable[[Weights, int], None],
    begun: Progress | None,
) -> BucketGRPOTrainer:
    """TRL's trainer, which hands the weights over at each sync, and first puts back what `begun` had."""
    trainer = NormRateTrainer(
        norm_rate=script.norm_learning_rate,
        model=script.model,
        args=args,
        processing_class=AutoTokenizer.from_pretrained(script.model),
        train_dataset=task.dataset,
        reward_funcs=task.reward_funcs,
        environment_factory=task.environment,
        rollout_worker=worker,
        hand_over=hand_over,
        begun=begun,
        callbacks=[rising.PutBack(publisher)],
    )
    if script.exact_old_policy:
        exact.use(trainer, publisher)
    if publisher.log:
        recorder = StepRecorder(publisher.log)
        trainer.add_callback(recorder)
        trainer.rollout_queue = recorder.watch(trainer.rollout_queue)
    return trainer


class _LastSync(TrainerCallback):
    """Publishes the last steps of a run whose length is not a multiple of `weight_sync_steps`."""

    def __init__(self, trainer: BucketGRPOTrainer, ending: Ending) -> None:
        self._trainer, self._ending = trainer, ending

    def on_train_end(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.weight_sync_steps and not self._ending.signal:
            self._trainer._sync_weight()


if __name__ == "__main__":
    main()
