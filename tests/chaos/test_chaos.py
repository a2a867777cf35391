"""Faults of every kind are survived, nothing wrong is served, nothing is left; and a lie would be seen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.followers import Claim
from tests.chaos.scene import Member, Place, checked
from tests.chaos.trainer import Truth


def chaos(faults: int, seed: int) -> None:
    """In a process of its own, or what other tests left open would count as leaked."""
    words = [sys.executable, "-m", "tests.chaos", f"--faults={faults}", f"--seed={seed}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    lines = result.stdout.splitlines() or [result.stderr]
    assert lines[-1] == f"faults {faults} survived {faults} wrong 0 leaked 0", result.stdout + result.stderr
    assert result.returncode == 0


@pytest.mark.full
def test_ten_faults_are_survived() -> None:
    """With signatures on, on a folder."""
    chaos(10, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_five_hundred_faults_are_survived(seed: int) -> None:
    """Also on the simulated Hub and S3, by two ranks, with a real vLLM; the second time all is signed."""
    chaos(500, seed)


@pytest.mark.parametrize(
    ("digest", "held", "wrong"), [("a", "a", False), ("a", "b", True), ("b", "b", True), ("c", "c", True)]
)
def test_what_is_held_and_what_is_claimed_must_be_what_was_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, held: str, wrong: bool
) -> None:
    monkeypatch.setattr("tests.chaos.scene.BETWEEN_S", 0.0)
    truth = Truth(tmp_path / "truth")
    truth.tell("writer", 7, "a")
    truth.tell("writer", 8, "b")
    liar = Member("liar", "local", Place("", tmp_path, {}))
    monkeypatch.setattr(liar, "claim", lambda: Claim(3, "writer", 7, digest, held))
    _, problem = checked(liar, truth)
    assert bool(problem) == wrong
