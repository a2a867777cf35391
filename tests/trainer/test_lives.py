"""TRL's trainer, ended by -9 and SIGTERM at random instants and started again with the same command."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("kills", "seed"),
    [pytest.param(2, 1, marks=pytest.mark.live), pytest.param(20, 2, marks=pytest.mark.long)],
)
def test_the_versions_are_those_of_a_trainer_that_was_left_alone(kills, seed, tmp_path):
    lives = [sys.executable, "-m", "tests.support.trainer_lives", str(tmp_path), str(kills), str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(lives, env=environment, capture_output=True, text=True, timeout=200 + 60 * kills)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "versions.json").read_text())
    assert [version for version, _, _ in result["undisturbed"]] == list(range(result["steps"] + 1))
    assert result["ended"] == result["undisturbed"], result["ends"]
    for number, end in enumerate(result["ends"]):
        code, log = int(end.rpartition(" ")[2]), (tmp_path / f"{number}.log").read_text()
        # One that is ended after a while may be done before that, and so are those after it.
        assert code in ((-9, 143)[number % 2], *([0] if kills > 4 else [])), f"{end}\n{log[-3000:]}"
        if code == 143:
            assert "the same command resumes the run" in log
