"""Asynchronous GRPO, in which weights reach the vLLM replicas only through a bucket.

    python -m trainer.train --config trainer/configs/wordle_tiny.yaml --bucket hf://buckets/me/wordle \\
        --run first --replicas https://me-vllm.hf.space --env_url https://me-wordle.hf.space

Rollouts come from the replicas over HTTPS. After each optimizer step (or every `weight_sync_steps`), the
trainer puts the changed weights into the bucket, and the replicas fetch them from there. If a trainer ends,
is killed or crashes, the same command resumes the run. Read `train` from top to bottom.

For several processes, write `accelerate launch --use_fsdp --fsdp_version 2 -m` instead of `python -m`. Then
each rank publishes its tensors and saves its part of the state, and only the main rank talks to replicas.
"""

import contextlib
import gc
import itertools
import logging
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml
from transformers import AutoTokenizer
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import DeltaWeightSyncError, Publisher, gpu_build
from delta_weight_sync.ending import end_after_signals
from delta_weight_sync.errors import ConfigError
from delta_weight_sync.publish.publisher import Model
from delta_weight_sync.publish.sharding import Peers
from delta_weight_sync.runlog import DoneEvent
from delta_weight_sync.store import open_bucket
from delta_weight_sync.trl import hooks, patches, sampling
from delta_weight_sync.trl.trainer import BucketGRPOTrainer, Progress
from trainer import exact, memory, resume, rollouts
from trainer.observe import Pokes, ReplicaWatch, StepRecorder
from trainer.settings import Settings
from trainer.spaces import Fleet, Spaces, SpacesUnavailableError
from trainer.stop import END_S, Stop
from trainer.tasks import Task, make_task

_FIRST_SYNC = 1  # TRL syncs once before the first step, and gives this sync the number 1
_HEAD_START_S = 0.05  # on a CPU, the next step waits at most twice this long for the publisher; see `on_sync`


def main() -> None:
    """Parse the command line and train. Expected errors print one sentence instead of a traceback."""
    logging.basicConfig(format="%(name)s: %(message)s")
    # The publisher's thread shares the interpreter with the training. With Python's usual switch interval of
    # 5 ms, each of that thread's many short calls could wait for 5 ms.
    sys.setswitchinterval(0.0005)
    try:
        settings, config = parse(sys.argv[1:])
        if settings.job:
            print(job_command(settings, sys.argv[1:]))
            return
    except DeltaWeightSyncError as error:
        sys.exit(f"trainer: {error}")
    if config.use_cpu and not (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        # without AVX-512, bf16 takes ten times as long
        config.bf16 = False
        config.mixed_precision = "no"
    try:
        train(settings, config)
    except (DeltaWeightSyncError, SpacesUnavailableError, TimeoutError) as error:
        sys.exit(f"trainer: {error}")
    except KeyboardInterrupt as interrupt:  # `Stop` puts the signal's number into it
        print("trainer: stopped; the same command resumes from what is in the bucket", flush=True)
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))


def parse(arguments: list[str]) -> tuple[Settings, AsyncGRPOConfig]:
    """The settings in command line and configuration. Raises `ConfigError` if they cannot be used."""
    parser = TrlParser((Settings, AsyncGRPOConfig))
    try:
        with readable_config(arguments) as readable:
            settings, config, rest = parser.parse_args_and_config(readable, return_remaining_strings=True)
    except (OSError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"--config: {problem}: name a YAML file, or its URL in a bucket") from error
    except ValueError as error:
        if "use_cpu" in str(error) and not torch.cuda.is_available():
            raise ConfigError("this machine has no GPU: use one that has, or add --use_cpu true") from error
        raise ConfigError(" ".join(str(error).split())) from error
    if rest:
        unknown = ", ".join(word for word in rest if word.startswith("--")) or rest[0]
        raise ConfigError(f"unknown option {unknown} (also in a --config): correct it, see --help")
    return settings, config


@contextlib.contextmanager
def readable_config(arguments: list[str]) -> Iterator[list[str]]:
    """The arguments, with a temporary file in place of a `--config` that is a URL in a bucket."""
    place = arguments.index("--config") + 1 if "--config" in arguments[:-1] else 0
    if not place or "://" not in arguments[place]:
        yield arguments
        return
    bucket, _, key = arguments[place].rpartition("/")
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(open_bucket(bucket).get(key))
        file.flush()
        yield [*arguments[:place], file.name, *arguments[place + 1 :]]


def job_command(settings: Settings, arguments: Sequence[str]) -> str:
    """The command that starts this trainer on a Job. There, deploy gives it bucket, run and addresses."""
    prefix = "hf://buckets/"
    owner, _, name = settings.bucket.removeprefix(prefix).partition("/")
    if not settings.bucket.startswith(prefix) or not name or "/" in name:
        raise ConfigError(
            f"--job: Jobs cannot use --bucket {settings.bucket}: name hf://buckets/<owner>/<name>"
        )
    config = dict(itertools.pairwise(arguments)).get("--config", "")
    if "://" not in config and (Path(config).is_absolute() or not Path(config).is_file()):
        fix = "name one of the checkout, by its path there, or in the bucket"
        raise ConfigError(f"--job: a Job has no --config {config or 'of yours'}: {fix}")
    given: list[str] = []
    is_kept = True
    for word in arguments:
        if word.startswith("--"):
            option = word[2:].partition("=")[0]
            is_kept = option not in ("job", "bucket", "run", "replicas", "env_url")
        given += [word] * is_kept
    place = f"--owner {owner} --name {name} --run {settings.run}"
    up = f"python -m trainer.deploy up --on jobs {place} --trainer-hardware {settings.job}"
    return f"{up} --train={shlex.quote(shlex.join(given))}"


def train(settings: Settings, config: AsyncGRPOConfig) -> None:
    """Train one run, from the base policy or from its newest saved state, to its last version."""
    # Without `token_budget`, TRL would ask a vLLM server for its limit, but perhaps none runs yet.
    if config.token_budget is None:
        raise SystemExit("--token_budget is missing: set the max tokens of a forward pass, or 0 for no limit")
    sampling.require_exact(vars(config))
    if not config.use_cpu and (problem := gpu_build.problem()):
        raise SystemExit(f"trainer: {problem}")
    if config.n_gpu > 1:
        fix = "write `accelerate launch` in place of `python`, or set CUDA_VISIBLE_DEVICES=0"
        raise SystemExit(f"TRL uses one GPU per process, but this process has {config.n_gpu}: {fix}")
    if not config.use_cpu and torch.cuda.is_available():
        shards = config.world_size if os.environ.get("ACCELERATE_USE_FSDP") == "true" else 1
        needs = memory.parts(settings.model, vars(settings) | vars(config), shards)
        if problem := memory.problem(needs, torch.cuda.mem_get_info()[0]):
            raise SystemExit(f"trainer: {problem}")
    patches.install(hooks.EVERY_RANK)  # fails if this TRL lacks the feature
    stop = Stop(settings.minutes, alone=config.world_size == 1)
    task = make_task(settings, config)
    peers = Peers()
    fleet = Fleet(settings.replicas if peers.main else [])  # the other ranks contact no Space
    spaces = Spaces(fleet, settings.env_url if peers.main else "")
    with peers.fail_together():  # an error on one rank ends all ranks
        spaces.wake()  # waking takes minutes, so do it first; a wrong URL or key ends the run here

    with contextlib.ExitStack() as stack:
        stack.enter_context(stop)
        pokes = stack.enter_context(contextlib.closing(Pokes(fleet)))
        publisher = stack.enter_context(
            Publisher(  # all ranks open the run; the main rank becomes its writer
                f"{settings.bucket}#{settings.run}",
                settings.model,
                encoding=settings.encoding,
                mirror=settings.mirror,
                keep=settings.keep or None,
                state_minutes=settings.state_minutes,
                peers=peers,
                on_version=pokes.send,
                fresh=settings.fresh,
            )
        )
        progress = resume.find_progress(publisher, fresh=settings.fresh)
        if progress and 0 < (last := config.max_steps) <= progress.trainer["global_step"]:
            if publisher.is_main:
                print(f"already trained to step {last}: raise --max_steps, or start again with --fresh")
            return
        worker = watch = None
        if log := publisher.log:  # only the main rank has the run's log, and talks to replicas
            watch = stack.enter_context(contextlib.closing(ReplicaWatch(fleet, log)))
            worker = rollouts.make_worker(
                settings.model, config, task, fleet, publisher.writer_term, progress
            )
        trainer = make_trainer(settings, config, task, publisher, worker, progress)
        states = resume.SaveState(publisher, trainer, settings.state_every)
        trainer.add_callback(states)
        # Add `stop` last. Its callback runs at the end of each step. From then on, a signal interrupts a
        # trainer of one process immediately, and would cut off a callback that runs later.
        trainer.add_callback(stop)

        with stop.interruptible():
            # Publish version 0 if the run is new. Otherwise check that the run has the same model.
            publisher.publish_base(trainer.weights(), _FIRST_SYNC)
            with peers.fail_together():
                spaces.wait()  # until the environment is ready and a replica serves a version
                rollouts.require_exact_ratios(fleet, config)
            gc.collect()
            gc.freeze()  # otherwise each collection scans all objects of the imports, for a fifth of a second
            trainer.begin()  # each sync calls `Publisher.publish`

        if stop.signal:
            sys.exit(finish_early(publisher, states, stop))
        newest = states.finish()  # the end of the `with` block waits for the upload of the state
        digest = publisher.digest(trainer.weights())
        if log and watch:
            ended: Literal["time", "steps"] = "time" if stop.out_of_time else "steps"
            log.append(DoneEvent(t=time.time(), version=newest.version, digest=digest, stopped_by=ended))
            watch.wait_for(newest.version)  # until all replicas serve the last version, for at most 2 minutes
            print(f"published version {newest.version}, digest {digest}", flush=True)


def make_trainer(
    settings: Settings,
    config: AsyncGRPOConfig,
    task: Task,
    publisher: Publisher,
    worker: rollouts.ReplicaRolloutWorker | None,
    progress: Progress | None,
) -> "PolicyTrainer":
    """Build the trainer. It publishes at each sync, and continues from `progress` when training begins."""

    def on_sync(weights: Model, number: int) -> None:
        publisher.publish(weights, number)
        # On a CPU, the next step would take a core and the interpreter from the thread that publishes, which
        # would then need twice as long. So let that thread finish first, unless the bucket is slow.
        if config.use_cpu and config.world_size == 1:
            with contextlib.suppress(TimeoutError):
                publisher.flush(_HEAD_START_S)
        # While a resumed trainer repeats the earlier trainer's syncs exactly, it does not publish them again.
        # Replicas then serve the earlier trainer's versions, so the worker must accept that trainer's syncs.
        if worker:
            worker.inherit(publisher.repeated_sync)

    trainer = PolicyTrainer(
        model=settings.model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        train_dataset=task.dataset,
        reward_funcs=task.reward_funcs,
        environment_factory=task.environment,
        rollout_worker=worker,
        on_sync=on_sync,
        resumed_from=progress,
        callbacks=[resume.Restore(publisher)],
    )
    trainer.norm_rate = settings.norm_learning_rate
    if settings.exact_old_policy:
        exact.enable(trainer, publisher)
    if publisher.log:
        trainer.rollout_queue = recorder = StepRecorder(publisher.log, trainer.rollout_queue)
        trainer.add_callback(recorder)
    return trainer


class PolicyTrainer(BucketGRPOTrainer):
    """Trains norms and biases at `norm_rate`. If that is 0, all weights are trained at `learning_rate`.

    Norms are about a thousandth of the weights or less, and decide how confident a policy is. More confidence
    is the first thing that RL teaches. With their own rate, norms learn this while few other weights change.
    """

    norm_rate = 0.0

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        for group in optimizer.param_groups:  # norms and biases have a group, because they do not decay
            if self.norm_rate and all(weight.ndim == 1 for weight in group["params"]):
                group["lr"] = self.norm_rate
        return optimizer


def finish_early(publisher: Publisher, states: resume.SaveState, stop: Stop) -> int:
    """After a signal, publish what is pending and save the state in the time left. Returns the exit code."""
    try:
        newest = states.finish(stop.left_s)
        publisher.flush(stop.left_s)
        state = "and the state is saved" if states.saved else "but the present state is not saved"
        outcome = f"version {newest.version} is published {state}"
    except (DeltaWeightSyncError, TimeoutError) as error:
        outcome = f"not everything is in the bucket ({error})"
    if publisher.is_main:
        name = signal.Signals(stop.signal).name
        print(f"trainer: {name}: {outcome}; the same command resumes the run", flush=True)
    return 128 + stop.signal


if __name__ == "__main__":
    # `Stop` promises the same, but while a library's code waits for a store, Python runs no handler.
    end_after_signals(END_S, {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM)})
    main()
