"""The command for GPUs, on tensors of the host, and the one that says which models can be followed."""

import os
import re
import subprocess
import sys

import pytest
import torch

from bench.compatibility import PAGE
from bench.gpu_check import __main__ as command
from bench.published import EXACT
from bench.results import ROOT

BREAK = """
import torch
from bench.gpu_check import __main__ as command, exact
from delta_weight_sync.vllm import gpu as device_memory
device_memory._put = lambda *given: None
command._as_on_a_device()
print(next(exact.rows(torch.device("cpu"))))
"""

TRAINER = """
import torch
from bench.gpu_check import trainer
print(*trainer.rows(torch.device("cpu")), sep="\\n")
"""

ONLY = """
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def add(name):
    home = canonicalize_name(name)
    if home not in allowed and home in installed:
        allowed.add(home)
        for need in map(Requirement, distribution(home).requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                add(need.name)

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        homes = set(map(canonicalize_name, packages.get(name.partition(".")[0], ())))
        if homes and not homes & allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

packages, allowed = packages_distributions(), set()
installed = {canonicalize_name(home) for homes in packages.values() for home in homes}
for name in ("delta-weight-sync", "torch"):
    add(name)
allowed.discard("triton")  # builds of torch for GPUs bring it
sys.meta_path.insert(0, Blocker())
from bench.gpu_check import __main__ as command, exact, speed, state
import torch
torch.cuda.is_available = lambda: True
for name in ("trainer", "replica"):
    print(*command._section(name, False))
"""


def said(*words: str) -> subprocess.CompletedProcess[str]:
    """How this Python ended, and what it printed."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.full
def test_the_checks_of_a_sync_need_only_the_packages_that_the_command_names():
    done = said("-c", ONLY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is not installed: the section was left out") == 2


@pytest.mark.full
@pytest.mark.long
def test_one_command_runs_all_of_the_check_on_tensors_of_the_host(tmp_path):
    """A line that no test runs would fail on the card, in the one hour that there is."""
    words = ["bash", "bench/gpu_check/nine_minutes.sh", "--on-host"]
    environment = os.environ | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert all(f"### {section}" in report for section in ("exact", "speed", "state"))
    assert f"{report.count('| PASS')} PASS, 0 FAIL:" in done.stdout


@pytest.mark.full
def test_a_section_that_takes_too_long_ends_alone():
    rows = list(command._limited("state", 0.01, on_host=True))
    assert any(row.startswith("| FAIL | state was ended at its limit") for row in rows)


@pytest.mark.long
def test_the_trainers_part_passes_here_too():
    """Five steps with versions that are the trainer's weights."""
    done = said("-c", TRAINER)
    assert done.stdout.count("| PASS") == 4, done.stdout + done.stderr


@pytest.mark.full
def test_without_a_gpu_and_unasked_it_says_what_to_do():
    done = said("-m", "bench.gpu_check", "--section", "exact")
    sentence = "FAIL | there is no GPU that torch can use; --on-host checks the same code without one"
    assert (done.returncode, sentence in done.stdout) == (1, True)


@pytest.mark.full
def test_a_commit_that_writes_nothing_is_a_failure():
    done = said("-c", BREAK)
    assert done.stdout.startswith("| FAIL | a replica: every bit pattern"), done.stdout + done.stderr


@pytest.mark.long
def test_a_replica_passes_here_too(monkeypatch):
    """In real vLLM on the CPU, with SmolLM2-135M: what is tried on a GPU is tried rightly."""
    from bench.gpu_check import replica

    for name, value in {"_SYNCS": 2, "_LONG": 192, "_WINDOWS": 1, "_WINDOW_S": 2.0}.items():
        monkeypatch.setattr(replica, name, value)
    rights = [row.right for row in replica.rows(torch.device("cpu")) if row.right is not None]
    assert rights == [True] * 4


# A tied and fused one, one that is loaded again in part, one whose weights vLLM would pack on a CPU, one with
# stacked experts and tensors in float32, and one whose parameters have other names than its checkpoint.
CHEAP = ("qwen3", "falcon", "qwen3_next", "deepseek_v3", "qwen2_5_vl")


@pytest.mark.long
def test_rows_of_the_page_are_what_the_command_finds():
    done = said("-m", "bench.compatibility", *CHEAP)
    assert done.returncode == 0, done.stderr
    assert f"- patched by a replica: {len(CHEAP)} equal a fresh load\n" in done.stdout
    assert len(_rows(done.stdout)) + len(_plain(done.stdout)) == len(CHEAP)
    assert set(_rows(done.stdout)) <= set(_rows(_follow_list()))
    assert set(_plain(done.stdout)) <= set(_plain(_follow_list()))


def test_every_architecture_of_the_page_can_be_followed_or_says_why_not():
    rows = _rows(_follow_list())
    assert len(rows) + len(_plain(_follow_list())) >= 90
    assert all(row.split("|")[2].strip().startswith((EXACT, "refused: ")) for row in rows)


def test_a_patched_model_of_the_page_equals_a_fresh_load_or_is_refused():
    (outcome,) = re.findall(r"^- patched by a replica: (.*)", PAGE.read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+ equal a fresh load, \d+ are refused \(.*\)", outcome)


def _follow_list() -> str:
    return PAGE.read_text().split("<!-- compatibility -->\n")[1].split("<!-- /compatibility -->")[0]


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def _plain(text: str) -> list[str]:
    """The architectures about which there is nothing to say."""
    (names,) = re.findall(r"^Exact, with nothing to note: (.*)\.$", text, re.MULTILINE)
    return names.split(", ")
