"""What the script adds to TRL's trainer: an end by time, a rate for the norms. In a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from delta_weight_sync import open_run
from delta_weight_sync.runlog import DoneEvent, RunLogReader
from delta_weight_sync.store import open_bucket
from tests.policies import tiny
from trainer.arguments import ScriptArguments

LIFE = (
    "from pathlib import Path; from tests.trainer import lives; lives.live(Path({folder!r}), {url!r}, {rest})"
)


def train(folder: Path, url: str, rest: str) -> DoneEvent:
    command = [sys.executable, "-c", LIFE.format(folder=str(folder), url=url, rest=rest)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    events = RunLogReader(open_bucket(url), "lives").poll()
    return [event for event in events if isinstance(event, DoneEvent)][-1]


@pytest.mark.live
def test_training_ends_with_its_time_and_goes_on_without_that_limit(tmp_path):
    """Its time is over before the first step, which it makes all the same; everything is published."""
    tiny.build(tmp_path / "base", tie=True, seed=0)
    url = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    done = train(tmp_path, url, "3, minutes=1e-6")
    assert (done.version, done.stopped_by) == (1, "time")
    head = open_run(url).at()
    assert (head.version, head.digest) == (1, done.digest)
    done = train(tmp_path, url, "3")
    assert (done.version, done.stopped_by) == (3, "steps")


@pytest.mark.live
def test_the_norms_may_learn_faster_than_the_matrices(tmp_path):
    """AdamW's first step moves every weight that has a gradient by about its learning rate."""
    tiny.build(tmp_path / "base", tie=True, seed=0)
    url = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    train(tmp_path, url, "1, norm_learning_rate=0.05")
    reader = open_run(url)
    for version in (0, 1):
        reader.checkout(reader.at(version), tmp_path / str(version))
    before, after = (load_file(tmp_path / str(version) / "model.safetensors") for version in (0, 1))
    moved = {name: (after[name].float() - before[name].float()).abs().max().item() for name in before}
    assert all(by > 0.04 for name, by in moved.items() if before[name].ndim == 1)
    assert all(by < 0.01 for name, by in moved.items() if before[name].ndim == 2)
    assert train(tmp_path, url, "2, norm_learning_rate=0.05").version == 2, "and goes on so"


@pytest.mark.parametrize("option", ["minutes", "norm_learning_rate"])
def test_what_is_less_than_nothing_is_refused(option):
    with pytest.raises(SystemExit, match=rf"--{option} must be at least 0; it is -1"):
        ScriptArguments(model="m", bucket="file:///b", run="r", replicas=[], **{option: -1.0})
