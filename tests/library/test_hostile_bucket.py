"""Whatever is in a bucket, the dashboard, the commands, followers and publishers take it or say a sentence.

Objects are forged so that every hash fits; `python -m tests.fuzz.bucket` goes on with as many as one likes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("cases", "seed"),
    [pytest.param(400, 1, marks=pytest.mark.full), pytest.param(10_000, 2, marks=pytest.mark.long)],
)
def test_forged_runs(cases: int, seed: int) -> None:
    """In a process of its own, whose memory is that of these cases."""
    command = [sys.executable, "-m", "tests.fuzz.bucket", "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    assert f"{cases} cases" in done.stdout
    for reader in ("dashboard", "command", "follower", "publisher"):
        assert f"{reader} took" in done.stdout
        assert f"{reader} refused" in done.stdout
