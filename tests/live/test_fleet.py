"""A run with four real replicas: two are killed while games are played there, and two others join."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import trainer.policies
from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import DoneEvent, ReplicaEvent, RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket
from env_space.app import create_app
from env_space.settings import Settings
from tests.live.replica import Replica
from tests.support.serving import serving
from tests.support.waiting import soon
from tests.trainer.test_fleet import listed

pytestmark = [pytest.mark.live, pytest.mark.long]

POLICY = Path(trainer.policies.__file__).parent / "wordle-tiny"
STEPS = 30
GAMES = 32
STALE = 3
OPTIONS = f"--max_steps {STEPS} --per_device_train_batch_size {GAMES} --max_staleness {STALE} --use_cpu true"


def test_games_go_on_while_replicas_die_and_join(tmp_path):
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    file = tmp_path / "replicas"
    names = [f"replica-{number}" for number in range(6)]
    replicas = [Replica(url, "fleet", tmp_path / name, name=name, max_model_len=256) for name in names]
    log = RunLogReader(open_bucket(url), "fleet")
    steps: list[StepEvent] = []
    states: list[ReplicaEvent] = []
    done: list[DoneEvent] = []

    def note_events() -> None:
        for event in log.poll():
            for kind, events in ((StepEvent, steps), (ReplicaEvent, states), (DoneEvent, done)):
                if isinstance(event, kind):
                    events.append(event)

    def reaches(step: int) -> bool:
        note_events()
        assert running.poll() is None, (tmp_path / "trainer.log").read_text()[-2000:]
        return bool(steps) and steps[-1].step >= step

    with ExitStack() as stack:
        env = stack.enter_context(serving(create_app(Settings())))
        for replica in replicas[:4]:
            stack.enter_context(replica)
        listed(file, replicas[:4])
        command = [sys.executable, "-m", "trainer.train", "--config", "trainer/configs/wordle_tiny.yaml"]
        command += ["--model", str(POLICY), "--bucket", url, "--run", "fleet", "--env_url", env]
        command += ["--replicas", str(file), "--output_dir", str(tmp_path / "trainer"), *OPTIONS.split()]
        with (tmp_path / "trainer.log").open("wb") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            running = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        stack.callback(running.kill)
        for replica in replicas[:4]:
            replica.wait_for(0)
        soon(lambda: reaches(4))
        for replica in replicas[:2]:
            replica.kill()
        soon(lambda: reaches(10))
        for replica in replicas[4:]:
            stack.enter_context(replica)
        listed(file, replicas[2:])
        assert running.wait(600) == 0, (tmp_path / "trainer.log").read_text()[-2000:]
        head = RunReader(open_bucket(url), "fleet").manifest()
        for replica in replicas[2:]:
            assert replica.wait_for(head.version)["digest"] == head.digest
        text = httpx.get(f"{env}/metrics").text
    note_events()
    trained = [step for step in steps if step.step]
    assert [step.step for step in trained] == [*range(1, STEPS + 1)]
    assert done[-1].digest == head.digest
    assert max(step.metrics["sample/staleness_max"] for step in trained) <= STALE
    counts = re.findall(r"^wordle_games_total{.*} (\S+)$", text, re.MULTILINE)
    ended = sum(int(float(count)) for count in counts)
    dropped = sum(step.metrics.get("sample/dropped_stale_total", 0) for step in trained)
    used = STEPS * GAMES + dropped
    assert used <= ended <= used + 3 * GAMES * STALE, "each game that ended is a sample, or waits to be one"
    last = {state.replica: state.state for state in states}
    assert [last[name] for name in names] == ["removed"] * 2 + ["serving"] * 4
