"""Runs environment, replica (with the dashboard) and trainer on this machine, for `make demo`.

Each of the three is a process with its own settings. The processes know each other only by URL. The trainer
signs each version with a new key pair, and the replica gets the public key. The dashboard and the lines that
the demo prints come from the run's log, which is in the bucket.
"""

import argparse
import contextlib
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from delta_weight_sync import gpu_build
from delta_weight_sync.errors import printable
from delta_weight_sync.runlog import (
    CommitEvent,
    DoneEvent,
    Event,
    ReplicaEvent,
    RunLogReader,
    StepEvent,
    SyncEvent,
    TrafficEvent,
)
from delta_weight_sync.signing import SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from delta_weight_sync.traffic import RunTraffic, TrafficSum
from delta_weight_sync.util import size_text
from trainer.demo.processes import ChildError, Processes, exclusive, free_port, interrupt_once

RUN = "demo"
# Trainer and replica share the machine: each uses one core, or a part of the GPU.
TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_TRAINER = Path(__file__).parents[1]
_GPU_SHARE = "--gpu-memory-utilization 0.3"
_TRAINING = 0.9  # share of the time for training; in the rest, the last version is published and served
_POLL_S = 0.5
_QUIET_S = 3.0  # a step is printed only if no line was printed for this time
_ENOUGH = 40  # with fewer steps, the rewards of the first and the last tenth are mostly chance


@dataclass(frozen=True)
class Policy:
    """A local policy: its training configuration, and what its replica needs."""

    config: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_mib: int  # for a replica on a CPU; with a larger cache, vLLM starts more slowly


POLICIES = {
    "wordle-tiny": Policy("wordle_tiny.yaml", 256, 64, 64),
    "smollm2": Policy("smollm2.yaml", 512, 32, 1024),
}


class Progress:
    """Prints the run's events as lines. Skips a step if the last line is less than three seconds old."""

    def __init__(self, minutes: float) -> None:
        self._started = time.monotonic()
        self._all_s = 60 * minutes
        self._said = 0.0  # when the last line was printed
        self.events: list[Event] = []
        # the replica's version and state
        self._serving = "none"
        self._state = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return max(0.0, self._all_s - self.seconds)

    def say(self, line: str) -> None:
        self._said = self.seconds
        print(f"[{self.seconds:6.1f} s] {printable(line)}", flush=True)

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case SyncEvent(version=0, payload_bytes=size):
                    self.say(f"version 0 is in the bucket ({size_text(size)}, the whole policy)")
                case CommitEvent(version=version):
                    self._serving = f"v{version}"
                case ReplicaEvent(version=None, error=error, state=state) if error and state != "unreachable":
                    raise ChildError(f"the replica cannot serve: {printable(error)}")
                case ReplicaEvent(state=state) if state != self._state:
                    self._state = state
                    self.say(f"replica: {state}")
                case StepEvent(reward=reward) if reward is not None and self.seconds >= self._said + _QUIET_S:
                    sync = next(e for e in reversed(self.events) if isinstance(e, SyncEvent))
                    share = 100 * sync.changed / sync.total
                    payload = size_text(sync.payload_bytes)
                    versions = f"trainer v{sync.version}, replica {self._serving}"
                    changed = f"{payload}, {share:.2f} % changed  {self.left_s:.0f} s left"
                    self.say(f"step {event.step:4}  reward {reward:6.3f}  {versions}  {changed}")
                case DoneEvent(version=version):
                    self.say(f"trained; the last version is {version}")


def summarize(events: Sequence[Event], model: str, seconds: float) -> dict[str, Any]:
    """Derive all figures of a finished run from its log. `seconds` is the duration of the whole demo.

    `verified` is true only if every replica has the trainer's last version, with the trainer's digest.
    Rewards are means over the first and the last tenth of the steps. Figures of a sync are medians.
    """
    syncs = [e for e in events if isinstance(e, SyncEvent)]
    deltas = [sync for sync in syncs if sync.version and sync.changed]
    commits = [e for e in events if isinstance(e, CommitEvent) and not e.joined]
    last = {e.replica: e for e in events if isinstance(e, ReplicaEvent)}
    held = {name: (e.version, e.digest) for name, e in last.items() if e.state != "removed"}
    done = next((e for e in reversed(events) if isinstance(e, DoneEvent)), None)
    rewards = [e.reward for e in events if isinstance(e, StepEvent) and e.reward is not None]
    tenth = max(1, len(rewards) // 10)
    traffic = TrafficSum()
    for event in events:
        if isinstance(event, TrafficEvent):
            traffic.add(event)
    medians = {"changed": [sync.changed / sync.total for sync in deltas]}
    medians |= {name: [getattr(e, name) for e in deltas] for name in ("payload_bytes", "publish_s")}
    medians |= {name: [getattr(e, name) for e in commits] for name in ("pause_ms", "commit_ms", "lag_s")}
    count = max(0, len(syncs) - 1)  # without version 0, which is published before the first step
    return {
        "model": model,
        "syncs": count,
        "traffic": traffic.total().as_dict(),
        "sync_bytes": traffic.total().sync_bytes / count if count else 0.0,
        "full_bytes": max((sync.full_bytes for sync in syncs), default=0),
        "steps": len(rewards),
        "reward_first": mean(rewards[:tenth] or [0.0]),
        "reward_last": mean(rewards[-tenth:] or [0.0]),
        "seconds": seconds,
        "stopped_by": done.stopped_by if done else None,
        "digest": done.digest if done else None,
        "replicas": held,
        "verified": done is not None and {*held.values()} == {(done.version, done.digest)},
        **{name: median(values or [0.0]) for name, values in medians.items()},
    }


def table(summary: dict[str, Any]) -> str:
    s = summary
    full = summary["full_bytes"]
    each = summary["sync_bytes"]
    few = ", too few steps to judge" if s["steps"] < _ENOUGH else ""
    limit = "step limit" if s["stopped_by"] == "steps" else "time limit"
    smaller = f", 1/{full / each:.0f} of a full sync" if each else ""
    rows = {
        "model": f"{s['model']}, {size_text(full)} in bf16",
        "time": f"{s['seconds']:.0f} s; ended by its {limit}",
        "syncs": f"{s['syncs']} in {s['steps']} steps",
        "reward": f"{s['reward_first']:.3f} -> {s['reward_last']:.3f}{few}",
        "changed per sync": f"{100 * s['changed']:.2f} % of the weights (medians, here and below)",
        "sent per sync": f"{size_text(each)}{smaller} (mean); the delta {size_text(s['payload_bytes'])}",
        "pause": f"{s['pause_ms']:.1f} ms, {s['commit_ms']:.1f} ms of it the commit",
        "after a step": f"in the bucket in {s['publish_s']:.2f} s, in the replica in {s['lag_s']:.2f} s",
        "trainer digest": s["digest"],
        "replicas": ", ".join(f"{name} at v{v} ({digest})" for name, (v, digest) in s["replicas"].items()),
        "verified": "yes: live weights equal the trainer's" if s["verified"] else "NO",
    }
    lines = [f"{name:18} {value}" for name, value in rows.items()]
    lines += ["", "after version 0, by kind:", *RunTraffic(**s["traffic"]).table(s["syncs"])]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def main() -> None:
    """`python -m trainer.demo [--policy NAME] [--minutes N] [--port N] [--folder DIR] [--quantization S]`."""
    parser = argparse.ArgumentParser("python -m trainer.demo", description="Run the loop on this machine.")
    parser.add_argument("--policy", choices=POLICIES, default="wordle-tiny")
    parser.add_argument("--minutes", type=float, default=5.0, help="time limit (default: 5)")
    parser.add_argument("--port", type=int, default=0, help="port of the dashboard (default: any free port)")
    files = "folder for the run; an earlier demo in it is deleted; smollm2's checkpoint is put next to DIR"
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), metavar="DIR", help=files)
    scheme = "vLLM's --quantization of the replica, such as fp8_per_channel, which also runs on a CPU"
    parser.add_argument("--quantization", default="", metavar="SCHEME", help=scheme)
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be a number above 0; it is {arguments.minutes}")
    interrupt_once()
    try:
        run_demo(
            arguments.policy,
            arguments.folder.resolve(),
            arguments.port,
            arguments.minutes,
            arguments.quantization,
        )
    except KeyboardInterrupt:
        print("stopped; all its processes have ended", file=sys.stderr)
        sys.exit(130)
    except ChildError as error:
        sys.exit(f"demo: {error}")


def run_demo(name: str, folder: Path, port: int, minutes: float, quantization: str = "") -> None:
    """Run the demo in `folder`, which must be new, empty or an earlier demo's. Raises `ChildError`."""
    if problem := gpu_build.problem():
        raise ChildError(problem)
    mark = folder / ".demo"
    if folder.exists() and not (folder.is_dir() and (mark.exists() or not any(folder.iterdir()))):
        raise ChildError(f"{folder} holds other files: name an empty folder, or an earlier demo's folder")
    with exclusive(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bucket").mkdir(parents=True)
        mark.touch()
        with Processes(folder) as processes:
            _run(processes, name, folder, port, minutes, quantization)


def _run(processes: Processes, name: str, folder: Path, port: int, minutes: float, quantization: str) -> None:
    policy = POLICIES[name]
    progress = Progress(minutes)
    bucket_url = (folder / "bucket").as_uri()
    replica_port = free_port(port)
    env_port = free_port()
    env_url = f"http://127.0.0.1:{env_port}"
    replica_url = f"http://127.0.0.1:{replica_port}"
    progress.say(f"dashboard    {replica_url}   (bucket {bucket_url})")
    progress.say(f"play Wordle  {env_url}   (yourself, or watch the policy)")
    progress.say(f"logs         {folder}/env.log, replica.log, trainer.log")
    progress.say("the programs start; until then, these addresses do not answer")
    model = _checkpoint(name, folder, progress)
    keys = new_pair()  # as on Spaces, the trainer signs and the replica verifies
    env = {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(env_port), "WORDLE_REPLICA_URL": replica_url}
    # The same low priority (nice 10) as the trainer's process for rollouts, if that runs on a CPU.
    processes.start("env", ["env_space.app"], env, nice=10)
    replica = replica_settings(policy, bucket_url, replica_port, folder, quantization)
    processes.start("replica", ["inference_space.app"], replica | keys | {SIGNING_KEY: ""})
    command = trainer_command(policy, model, bucket_url, replica_url, env_url)
    command += ["--minutes", f"{max(progress.left_s * _TRAINING / 60, 0.001):.3f}"]  # 0: no limit
    processes.start("trainer", command, TRAINER_ENVIRONMENT | keys, may_end=True)

    reader = RunLogReader(open_bucket(bucket_url), RUN)
    while not processes.finished("trainer"):
        progress.show(reader.poll())
        time.sleep(_POLL_S)
    progress.show(reader.poll())
    summary = summarize(progress.events, name, progress.seconds)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{table(summary)}\n\nall figures: {folder}/summary.json", flush=True)
    print(f"the dashboard again: python -m inference_space.dashboard --bucket {bucket_url}", flush=True)
    if not summary["verified"]:
        raise ChildError(f"a replica does not hold the trainer's weights; see {folder}/summary.json")
    if sys.stdout.isatty():
        print(f"the dashboard stays up at {replica_url} - press Ctrl-C to end it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # nothing is cut off, so this is no failure
            threading.Event().wait()


def _checkpoint(name: str, folder: Path, progress: Progress) -> Path:
    if name != "smollm2":
        return _TRAINER / "policies" / name
    from transformers.utils import logging

    from trainer.policies import smollm2

    logging.disable_progress_bar()
    progress.say("policy       SmolLM2-135M after imitation learning   (unpacked at the first start)")
    return smollm2.build(folder.parent / "smollm2-reverse-text", "reverse_text")


def replica_settings(
    policy: Policy, bucket_url: str, port: int, folder: Path, quantization: str = ""
) -> dict[str, str]:
    arguments = (
        _GPU_SHARE if gpu_build.is_installed() else f"--kv-cache-memory-bytes {policy.kv_cache_mib << 20}"
    )
    if quantization:
        arguments += f" --quantization {quantization}"
    return {
        "REPLICA_BUCKET": bucket_url,
        "REPLICA_RUN": RUN,
        "REPLICA_NAME": "replica-1",
        "REPLICA_HOST": "127.0.0.1",
        "REPLICA_PORT": str(port),
        "REPLICA_POLL_S": "0.1",
        "REPLICA_MAX_MODEL_LEN": str(policy.max_model_len),
        "REPLICA_MAX_NUM_SEQS": str(policy.max_num_seqs),
        "REPLICA_FOLDER": str(folder / "replica"),
        "REPLICA_VLLM_ARGS": arguments,
        "OMP_NUM_THREADS": "1",
    }


def trainer_command(policy: Policy, model: Path, bucket: str, replica: str, env: str) -> list[str]:
    """The trainer's module and arguments, without the time limit."""
    command = ["trainer.train", "--config", str(_TRAINER / "configs" / policy.config), "--model", str(model)]
    command += ["--bucket", bucket, "--run", RUN, "--replicas", replica, "--env_url", env]
    command += ["--state_every", "0"]  # the next demo deletes the run, so nothing resumes from it
    return command if gpu_build.is_installed() else [*command, "--use_cpu", "true"]


if __name__ == "__main__":
    main()
