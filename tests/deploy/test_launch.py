"""The command that `up` prints, with the run file of Qwen3-0.6B and a policy that this machine can train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.buckets import open_bucket
from shared.history import RunReader
from shared.runlog import DoneEvent, RunLogReader
from tests.deploy.conftest import POLICY
from tests.env.service import space
from tests.live.replica import Replica

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
# What the tiny policy needs instead: its own prompt, three tokens a guess, a CPU.
TINY = [
    "--model",
    str(POLICY),
    "--prompt",
    "Play Wordle.",
    "--max_completion_length",
    "3",
    "--use_cpu",
    "true",
]
NAMES = ("replica-1", "replica-2")
SHORT = ["--max_steps", "2", "--per_device_train_batch_size", "16", "--num_generations", "8"]


def test_accelerate_launch_trains_with_a_run_file_from_cold_spaces(tmp_path):
    """Trainer first: it waits for a replica, and two of them start when version 0 is there."""
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    replicas = [Replica(url, "first", tmp_path / name, name=name, max_model_len=256) for name in NAMES]
    try:
        for replica in replicas:
            replica.start()
        with space(tmp_path, WORDLE_ANSWERS="128") as env:
            ended = _launch(tmp_path, url, [replica.url for replica in replicas], env.url)
        head = RunReader(open_bucket(url), "first").at()
        digests = {replica.wait_for(head.version)["digest"] for replica in replicas}
    finally:
        for replica in replicas:
            replica.stop()
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "waiting for the Spaces" in ended.stdout
    done = next(e for e in RunLogReader(open_bucket(url), "first").poll() if isinstance(e, DoneEvent))
    assert head.version == 2
    assert digests == {head.digest} == {done.digest}


def _launch(folder: Path, bucket: str, replicas: list[str], env: str) -> subprocess.CompletedProcess[str]:
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--cpu", "--num_processes", "1", "-m", "trainer.train"]
    command += ["--config", "trainer/configs/qwen3_0_6b.yaml", "--output_dir", str(folder / "trainer")]
    command += ["--bucket", bucket, "--run", "first", "--replicas", *replicas, "--env_url", env]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, *TINY, *SHORT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
