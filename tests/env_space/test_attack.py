"""256 games of a trainer go on while one hostile client does all it can at once: no error, little memory."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import env_space
from tests.env_space import attack as attacker
from tests.env_space import load
from tests.env_space.service import PATIENCE_S, ROOT, space

pytestmark = pytest.mark.long

KEY = "four-random-words-in-a-row"
SECONDS = 15  # of play; the attack goes on until the last game is over
DECLARED = Path(env_space.__file__).with_name("openenv.yaml").read_text()
MEMORY = int(re.search(r"memory_mb: (\d+)", DECLARED)[1]) * 10**6
MAX_LOG = 5 * 10**6  # bytes; a flood of any kind is a few hundred lines a minute


def test_a_trainers_games_go_on_under_attack(tmp_path):
    variables = {"WORDLE_KEY": KEY, "WORDLE_REPLICA_URL": "http://127.0.0.1:9"}
    with space(tmp_path, **variables) as running:
        before = series(running.url)
        with subprocess.Popen(attack(running.url), cwd=ROOT, stdout=subprocess.PIPE) as attackers:
            played = asyncio.run(load.run(running.url, "http", 256, SECONDS, think=0.5, key=KEY))
            tried = json.loads(attackers.communicate(timeout=PATIENCE_S)[0])
        peak = peak_memory(running.process.pid)
        assert httpx.get(f"{running.url}/health", timeout=PATIENCE_S).json()["status"] == "healthy"
        assert running.process.poll() is None
        assert series(running.url) - before < 60, "labels are ours, not the client's"
    log = (tmp_path / "space.log").stat().st_size
    print(json.dumps({"played": played, "tried": tried, "peak_mb": peak / 1e6, "log_mb": log / 1e6}))
    assert (played["errors"], played["first_errors"]) == (0, [])
    assert played["games"] >= 256
    assert tried.keys() == {attack.__name__ for attack in attacker.AT_ONCE}
    assert peak < MEMORY
    assert log < MAX_LOG


def attack(url):
    options = ["--key", KEY, "--seconds", str(SECONDS + 5)]
    return [sys.executable, "-m", "tests.env_space.attack", url, *options]


def series(url):
    return len(httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines())


def peak_memory(pid):
    """In bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
