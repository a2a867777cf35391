"""The whole loop with the real parts: TRL learns through the bucket, and survives the loss of its replica."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import DoneEvent, RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket
from tests.live.replica import Replica
from tests.support import tiny_policy as tiny
from tests.support.waiting import soon

pytestmark = [pytest.mark.live, pytest.mark.long]

CONFIG = """
task: brevity
learning_rate: 3.0e-3
max_steps: 60
per_device_train_batch_size: 32
num_generations: 8
max_completion_length: 32
max_inflight_tasks: 64
max_staleness: 3
token_budget: 0
dtype: float32
bf16: false
use_cpu: true
gradient_checkpointing: false
logging_steps: 1
save_strategy: "no"
report_to: none
disable_tqdm: true
"""


def start_trainer(folder: Path, bucket_url: str, replica_url: str) -> subprocess.Popen[bytes]:
    tiny.build(folder / "base", tie=True, seed=0)
    (folder / "config.yaml").write_text(CONFIG + f"output_dir: {folder}/trainer\n")
    command = [sys.executable, "-m", "trainer.train", "--config", str(folder / "config.yaml")]
    command += ["--model", str(folder / "base"), "--bucket", bucket_url, "--run", "loop"]
    command += ["--replicas", replica_url]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "trainer.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def reaches(reader: RunLogReader, trainer: subprocess.Popen[bytes], step: int) -> bool:
    assert trainer.poll() is None, f"the trainer did not reach step {step}"
    return any(isinstance(event, StepEvent) and event.step >= step for event in reader.poll())


def test_brevity_is_learned_through_the_bucket_although_the_replica_dies(tmp_path):
    """The immediate-end-of-turn sanity check of the original work, with a -9 in the middle."""
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    with Replica(url, "loop", tmp_path / "replica") as replica:
        trainer = start_trainer(tmp_path, url, replica.url)
        try:
            log = RunLogReader(open_bucket(url), "loop")
            soon(lambda: reaches(log, trainer, 15))
            replica.kill()
            replica.start()
            assert trainer.wait(400) == 0, (tmp_path / "trainer.log").read_text()[-2000:]
            head = RunReader(open_bucket(url), "loop").manifest()
            status = replica.wait_for(head.version)
        finally:
            trainer.kill()
    events = list(RunLogReader(open_bucket(url), "loop").poll())
    rewards = [e.reward for e in events if isinstance(e, StepEvent) and e.step]
    done = next(e for e in events if isinstance(e, DoneEvent))
    means = [sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4)]
    assert max(means) > max(0.9, means[0] + 0.2), json.dumps(rewards)
    assert head.version >= 40
    staleness = [e.metrics["sample/staleness_mean"] for e in events if isinstance(e, StepEvent) and e.step]
    assert all(0 <= s <= 3 for s in staleness), "samples are tagged with the version that made them"
    assert max(staleness) > 0
    assert status["digest"] == head.digest == done.digest, "replica, bucket and trainer hold the same bits"
