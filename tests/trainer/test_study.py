"""The paired study: two ways for the weights and one run, and the table that says so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from env_space.app import create_app
from env_space.settings import Settings
from tests.policies.serving import serving
from trainer.study.table import ARMS, read, table

BOTH = """
import sys
from trainer import held_out
from trainer.study import run

held_out.GAMES = 24
folder, env_url = sys.argv[1:]
for carrier in ("whole", "deltas"):
    options = f"--carrier {carrier} --lag 2 --seed 5 --steps 4 --env_url {env_url}"
    sys.argv = ["run", *options.split(), "--out", f"{folder}/{carrier}.jsonl"]
    run.main()
"""


@pytest.mark.long
def test_a_run_whose_weights_travel_as_deltas_is_the_run_whose_weights_travel_whole(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with serving(create_app(Settings())) as env_url:
        command = [sys.executable, "-c", BOTH, str(tmp_path), env_url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, deltas = (read(tmp_path / f"{name}.jsonl") for name in ("whole", "deltas"))
    assert len(set(whole.digests)) == len(whole.steps) == 4, "every step is a version of its own"
    assert whole.digests == deltas.digests
    assert (whole.before, whole.after) == (deltas.before, deltas.after)
    for one, other in zip(whole.steps, deltas.steps, strict=True):
        assert one["size"] > 20 * other["size"]
        assert {**one, "size": 0} == {**other, "size": 0}, "reward, ratio and all else are equal, too"
    assert [step["staleness"] for step in whole.steps] == [0, 1, 2, 2]
    assert whole.steps[0]["ratio"] == pytest.approx(1, abs=1e-3)


def written(out: Path, arm: Any, seed: int, digest: str, after: int) -> None:
    step = {"step": 1, "staleness": arm.lag, "reward": 0.5, "solved": 0.1, "invalid": 0.01, "ratio": 1.0}
    steps = [step | {"kl": 0.0, "size": 1000, "digest": f"{digest}-{number}"} for number in range(8)]
    lines = [*steps, {"before": 10, "after": after, "games": 100, "s": 1.0}]
    (out / arm.file(seed)).write_text("\n".join(map(json.dumps, lines)))


def test_the_table_names_the_runs_that_are_the_same_at_every_version(tmp_path):
    for arm in ARMS:
        for seed in range(2):
            written(tmp_path, arm, seed, f"{arm.lag}-{seed}", 30 + 10 * seed)
    rows = {line.split(" | ")[0].strip("| "): line for line in table(tmp_path, range(2)).splitlines() if line}
    assert rows["asynchronous, deltas"].endswith("| asynchronous, whole weights |")
    assert rows["very asynchronous, deltas"].endswith("|  |")
    assert "10.0 % -> 35.0 ± 5.0 %" in rows["asynchronous, deltas"]
    written(tmp_path, ARMS[2], 1, "another", 40)
    assert "asynchronous, whole weights |" not in table(tmp_path, range(2)).splitlines()[4], (
        "one seed differs"
    )
