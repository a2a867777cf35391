"""Whatever is in a bucket, the dashboard, the commands, followers and publishers take it or say a sentence.

Objects are forged so that every hash fits; `python -m tests.fuzz.bucket` goes on with as many as one likes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def fuzz(cases: int, seed: int) -> str:
    """In a process of its own, whose memory is that of these cases."""
    command = [sys.executable, "-m", "tests.fuzz.bucket", "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.full
def test_hundreds_of_forged_runs() -> None:
    said = fuzz(400, 1)
    assert "400 cases" in said
    for reader in ("dashboard", "command", "follower", "publisher"):
        assert f"{reader} took" in said
        assert f"{reader} refused" in said


@pytest.mark.long
def test_thousands_of_forged_runs() -> None:
    assert "10000 cases" in fuzz(10_000, 2)
