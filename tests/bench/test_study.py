"""The paired study: deltas and whole weights give the same run, and the table shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.research.study.table import ARMS, read, table, times
from env_space.app import create_app
from env_space.settings import Settings
from tests.support.serving import serving

BOTH = """
import sys
from bench.research import held_out
from bench.research.study import run

held_out.GAMES = 24
folder, env_url = sys.argv[1:]
for transport in ("whole", "deltas"):
    options = f"--transport {transport} --lag 2 --seed 5 --steps 4 --env_url {env_url}"
    sys.argv = ["run", *options.split(), "--out", f"{folder}/{transport}.jsonl"]
    run.main()
"""
APART = {"size": 0, "play_s": 0, "train_s": 0}


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
        assert {**one, **APART} == {**other, **APART}, "reward, ratio and all else are equal, too"
    assert [step["staleness"] for step in whole.steps] == [0, 1, 2, 2]
    assert whole.steps[0]["ratio"] == pytest.approx(1, abs=1e-3)


def written(out: Path, arm: Any, seed: int, digest: str, after: int) -> None:
    step = {"step": 1, "reward": 0.5, "solved": 0.1, "invalid": 0.01, "ratio": 1.0}
    step |= {"kl": 0.0, "size": 1000, "play_s": 1.0, "train_s": 2.0}
    steps = [step | {"staleness": min(n, arm.lag), "digest": f"{digest}-{n}"} for n in range(8)]
    lines = [*steps, {"before": 10, "after": after, "games": 100, "s": 1.0}]
    (out / arm.file(seed)).write_text("\n".join(map(json.dumps, lines)))


def test_the_table_names_the_runs_that_are_the_same_at_every_version(tmp_path):
    for arm in ARMS:
        for seed in range(2):
            written(tmp_path, arm, seed, f"{arm.lag}-{seed}", 30 + 10 * seed)
    first = table(tmp_path, range(2)).split("\n\n")[0].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in first}
    assert rows["asynchronous, deltas"].endswith("| asynchronous, whole weights |")
    assert rows["very asynchronous, deltas"].endswith("|  |")
    assert "10.0 % -> 35.0 ± 5.0 %" in rows["asynchronous, deltas"]
    written(tmp_path, ARMS[2], 1, "another", 40)
    row = table(tmp_path, range(2)).splitlines()[4]
    assert "asynchronous, whole weights |" not in row, "one seed differs"


def scene(staleness: int, size: int) -> list[dict[str, float]]:
    """Ten steps; a batch takes a second to play and two to train on."""
    batch = {"size": size, "play_s": 1.0, "train_s": 2.0}
    return [batch | {"staleness": min(step, staleness)} for step in range(10)]


def test_over_a_fast_link_the_trainer_is_never_kept_waiting_but_for_the_first_batch():
    assert times(scene(1, 1), 1e9).wall_s == pytest.approx(1 + 10 * 2)


def test_over_a_slow_link_each_version_is_waited_for_and_a_tenth_of_the_bytes_is_waited_for_a_tenth_as_long():
    whole, deltas = (times(scene(1, size), 1e5) for size in (1_000_000, 100_000))
    # Two batches by the first version; then each step waits for the version before the last: 10 s, or 1 s.
    assert whole.wall_s == pytest.approx(3 + 8 * 10 + 1 + 2)
    assert deltas.wall_s < whole.wall_s / 3
    assert deltas.idle < whole.idle
    assert whole.idle > 0.8
    assert times(scene(4, 300_000), 1e5).wall_s < times(scene(1, 300_000), 1e5).wall_s, "older batches hide"
