"""The whole demo on Jobs of the simulated Hub: up, train, a Job killed and one expired, verified, down.

Each Job is a real process: environment, replica with vLLM, trainer and keeper. All use the real client.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.runlog import CommitEvent, Event, RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket
from tests.support.hubsim import REPOSITORY, HubSim
from trainer.demo.__main__ import summarize

OWNER = "free"  # without PRO
WRITE = "hf_jobsDemoWriteToken"
READ = "hf_jobsDemoReadToken"
STEPS = 14
# This machine runs all of the Jobs, and an expired trainer may have to end in the middle of a step.
SMALL = "--per_device_train_batch_size 16 --max_inflight_tasks 16 --state_every 1 --state_minutes 0"
PATIENCE_S = 600.0

pytestmark = [pytest.mark.live, pytest.mark.long]


class Demo:
    """One deployment, and the command line as its owner meets it."""

    def __init__(self, hub: HubSim, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.said = ""
        path = f"{hub.ports()['PYTHONPATH']}:{REPOSITORY / 'shared'}:{REPOSITORY}"
        own = {"SPACE_HF_TOKEN": READ, "SPACE_KEY": "", "SPACES": ""}
        self.environ = {
            **os.environ,
            **hub.env(folder / "home", WRITE),
            **hub.ports(),
            **own,
            "PYTHONPATH": path,
        }
        self.events: list[Event] = []

    def run(self, *command: str) -> str:
        words = [sys.executable, "-m", "trainer.deploy", *command, "--owner", OWNER]
        run = subprocess.run(
            words, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
        self.said += run.stdout + run.stderr
        assert run.returncode == 0, self.said
        return run.stdout

    def jobs(self, app: str) -> list[dict]:
        return [job for job in self.hub.jobs() if job["labels"]["app"] == app]

    def log(self, job: dict) -> str:
        return (self.hub.root / "jobs" / job["id"] / "log").read_text()

    def until(self, is_so: Callable[[], object], reader: RunLogReader) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, "".join(
                f"\n== {job['labels']['app']}\n{self.log(job)[-3000:]}" for job in self.hub.jobs()
            )
            self.events += reader.poll()
            time.sleep(0.5)

    def steps(self) -> int:
        return max((event.step for event in self.events if isinstance(event, StepEvent)), default=0)


def test_the_demo_on_jobs_survives_a_killed_and_an_expired_job(tmp_path, monkeypatch):
    with HubSim(tmp_path / "hub") as hub:
        hub.add_account(OWNER, is_pro=False, can_pay=True)
        hub.add_token(WRITE, user=OWNER)
        hub.add_token(READ, user=OWNER, role="read")
        for name, value in hub.env(tmp_path / "reader", WRITE).items():
            monkeypatch.setenv(name, value)
        demo = Demo(hub, tmp_path)
        train = f"--train=--max_steps {STEPS} {SMALL}"
        out = demo.run("up", "--on", "jobs", "--hardware", "cpu-basic", train)
        assert "costs $0.04 per hour, so at most $0.48 in 12 hours" in out
        assert "replica-1: waiting for the run's first version" in out or "replica-1: serving" in out
        reader = RunLogReader(open_bucket(f"hf://buckets/{OWNER}/wordle"), "first")

        demo.until(lambda: demo.steps() >= 2, reader)
        (replica,) = demo.jobs("replica-1")
        hub.end_job(replica["id"], "Job failed with exit code: 137")
        demo.until(lambda: len(demo.jobs("replica-1")) == 2, reader)
        reached = demo.steps()
        demo.until(lambda: demo.steps() >= reached + 2, reader)

        (trainer,) = demo.jobs("trainer")
        hub.end_job(trainer["id"], "Job timeout", number=15)
        demo.until(lambda: len(demo.jobs("trainer")) == 2, reader)
        (keeper,) = demo.jobs("keeper")
        demo.until(lambda: demo.jobs("keeper")[0]["status"]["stage"] != "RUNNING", reader)
        demo.events += reader.poll()

        assert demo.jobs("keeper")[0]["status"]["stage"] == "COMPLETED", demo.log(keeper)
        said = demo.log(keeper)
        assert f"{replica['id']} had ended (ERROR: Job failed with exit code: 137)" in said
        assert f"{trainer['id']} had ended (ERROR: Job timeout)" in said
        assert "watch: the training is complete; ending the deployment" in said
        assert re.search(r"spent at least \$0\.0\d+ since", said)

        summary = summarize(demo.events, "wordle-tiny", 0.0)
        assert summary["verified"], summary
        assert summary["stopped_by"] == "steps"
        assert demo.steps() == STEPS
        joined = [e for e in demo.events if isinstance(e, CommitEvent) and e.joined]
        assert joined[-1].version > 0  # the second replica joined late
        trained = [e.step for e in demo.events if isinstance(e, StepEvent)]
        assert trained.count(1) == 1, "the second trainer resumed"

        out = demo.run("down", "--on", "jobs")
        assert re.search(r"replica-1 +2 +\d+ +cpu-basic +0\.00", out)
        assert re.search(r"spent at least \$0\.0\d+ since", out)
        ended = {
            app: [job["status"]["stage"] for job in demo.jobs(app)] for app in ("env", "replica-1", "trainer")
        }
        assert ended == {
            "env": ["CANCELED"],
            "replica-1": ["ERROR", "CANCELED"],
            "trainer": ["ERROR", "COMPLETED"],
        }
        secrets = [
            WRITE,
            READ,
            *re.findall(r"SPACE_KEY=(\S+)", (tmp_path / ".deploy" / OWNER / "env").read_text()),
        ]
        secrets += re.findall(
            r"ed25519_secret_\w+", (tmp_path / ".deploy" / OWNER / "wordle.env").read_text()
        )
        shown = demo.said + "".join(map(demo.log, hub.jobs())) + "\n".join(hub.requests())
        shown += "".join(str([job["command"], job["environment"], job["labels"]]) for job in hub.jobs())
        assert not [secret for secret in secrets if secret in shown]
        # Only the processes that no stranger reaches may write.
        writers = {job["labels"]["app"] for job in hub.jobs() if WRITE in job["secrets"].values()}
        assert writers == {"trainer", "keeper"}
