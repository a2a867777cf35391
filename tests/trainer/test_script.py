"""What the script adds to TRL's trainer: an end by time, and a rate for the norms."""

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

LIVES = """
import sys
from pathlib import Path
from tests.trainer.lives import live

folder, timed, rated = Path(sys.argv[1]), *sys.argv[2:]
live(folder, timed, 3, minutes=1e-6)
live(folder, timed, 3)
live(folder, rated, 1, norm_learning_rate=0.05)
live(folder, rated, 2, norm_learning_rate=0.05)
"""


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a run that had no time and went on with more, and of one with a rate for the norms that went on."""
    folder = tmp_path_factory.mktemp("script")
    tiny.build(folder / "base", tie=True, seed=0)
    for name in ("timed", "rated"):
        (folder / name).mkdir()
    timed, rated = ((folder / name).as_uri() for name in ("timed", "rated"))
    command = [sys.executable, "-c", LIVES, str(folder), timed, rated]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return timed, rated


def ends(url: str) -> list[DoneEvent]:
    events = RunLogReader(open_bucket(url), "lives").poll()
    return [event for event in events if isinstance(event, DoneEvent)]


@pytest.mark.live
def test_training_ends_with_its_time_and_goes_on_without_that_limit(buckets):
    """Its time is over before the first step, which it makes all the same; everything is published."""
    early, late = ends(buckets[0])
    assert (early.version, early.stopped_by) == (1, "time")
    assert (late.version, late.stopped_by) == (3, "steps")
    run = open_run(buckets[0])
    assert [run.at(done.version).digest for done in (early, late)] == [early.digest, late.digest]


@pytest.mark.live
def test_the_norms_may_learn_faster_than_the_matrices(buckets, tmp_path):
    """AdamW's first step moves every weight that has a gradient by about its learning rate."""
    run = open_run(buckets[1])
    for version in (0, 1):
        run.checkout(run.at(version), tmp_path / str(version))
    before, after = (load_file(tmp_path / str(version) / "model.safetensors") for version in (0, 1))
    moved = {name: (after[name].float() - before[name].float()).abs().max().item() for name in before}
    assert all(by > 0.04 for name, by in moved.items() if before[name].ndim == 1)
    assert all(by < 0.01 for name, by in moved.items() if before[name].ndim == 2)
    assert [done.version for done in ends(buckets[1])] == [1, 2], "and goes on so"


@pytest.mark.parametrize("option", ["minutes", "norm_learning_rate"])
def test_what_is_less_than_nothing_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"--{option} must be at least 0; it is -1"):
        ScriptArguments(model="m", bucket=tmp_path.as_uri(), run="r", replicas=[], **{option: -1.0})
