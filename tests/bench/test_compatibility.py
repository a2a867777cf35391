"""The page that says which models can be followed says what its command finds."""

import os
import subprocess
import sys

import pytest

from bench.compatibility import PAGE
from bench.results import ROOT

# A tied and fused one, one that is loaded anew in part, and one whose weights vLLM would pack on a CPU.
CHEAP = ("qwen3", "falcon", "qwen3_next")


@pytest.mark.long
def test_rows_of_the_page_are_what_the_command_finds():
    command = [sys.executable, "-m", "bench.compatibility", *CHEAP]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(CHEAP)
    assert set(rows) <= set(PAGE.read_text().splitlines())


def test_every_architecture_of_the_page_can_be_followed_or_says_why_not():
    rows = PAGE.read_text().split("<!-- compatibility -->\n")[1].split("<!-- /compatibility -->")[0]
    verdicts = [row.rstrip(" |").rpartition(" | ")[2] for row in rows.splitlines()[2:]]
    assert len(verdicts) >= 24
    assert all(verdict.startswith(("exact", "refused: ")) for verdict in verdicts)
