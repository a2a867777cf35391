"""upstream/: every patch fits the installed release, and does what its own tests say."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[2] / "upstream"


def series(package: str) -> list[Path]:
    return sorted((UPSTREAM / package).glob("*.patch"))


PACKAGES = ["vllm", "trl"]
ALL = [patch for package in PACKAGES for patch in series(package)]
EVERY = [pytest.param(patch, id=f"{patch.parent.name}-{patch.name[:4]}") for patch in ALL]
HEADERS = {
    "vllm": "# SPDX-License-Identifier: Apache-2.0\n",
    "trl": "# Copyright 2020-2026 The HuggingFace Team.",
}


def installed(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent


def touched(patches: Iterable[Path]) -> list[str]:
    """The files that patches change or create, as paths in the package's repository."""
    found = (re.findall(r"^diff --git a/(\S+) b/", patch.read_text(), re.MULTILINE) for patch in patches)
    return sorted({path for paths in found for path in paths})


def apply(patches: Sequence[Path], folder: Path) -> None:
    """Apply patches, one after the other; raises `AssertionError` with git's words if one does not fit."""
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        command = ["git", "apply", "--verbose", "-C1", str(patch)]  # vLLM's are for the newest release
        done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def copy_touched(package: str, patches: Sequence[Path], folder: Path) -> None:
    """Put copies of the files that patches change under `folder`."""
    for path in touched(patches):
        original = installed(package).parent / path
        if path.startswith(f"{package}/") and original.exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(original.read_bytes())


def link_others(package: str, folder: Path) -> None:
    """Link the rest of the installed package next to the files that are already under `folder`."""
    here = installed(package)
    for parent in [folder / package, *(path for path in (folder / package).rglob("*") if path.is_dir())]:
        original = here / parent.relative_to(folder / package)
        for entry in original.iterdir() if original.exists() else ():
            if entry.name != "__pycache__" and not (parent / entry.name).exists():
                (parent / entry.name).symlink_to(entry)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Its series is applied to copies of its files in `tmp_path`."""
    copy_touched(request.param, series(request.param), tmp_path)
    apply(series(request.param), tmp_path)
    return str(request.param)


def test_the_series_applies_to_the_installed_release(package, tmp_path):
    for path in touched(series(package)):
        compile((tmp_path / path).read_text(), path, "exec")


@pytest.mark.parametrize("patch", EVERY)
def test_a_patch_says_why_and_what_and_brings_its_test(patch):
    text = patch.read_text()
    message = text[: text.index("\ndiff --git ")]
    assert all(f"\n{word}: " in message for word in ("Why", "What", "Test"))
    named = re.findall(r"tests/\S+\.py", message)
    assert named
    assert set(named) == {path for path in touched([patch]) if path.startswith("tests/")}


@pytest.mark.parametrize("patch", EVERY)
def test_new_files_have_the_headers_of_their_project(patch):
    created = re.findall(r"^--- /dev/null\n\+\+\+ b/.*\n@@.*\n\+(.*\n)", patch.read_text(), re.MULTILINE)
    assert created, "at least its test is new"
    assert all(first.startswith(HEADERS[patch.parent.name]) for first in created)


def test_the_readme_lists_these_patches_and_no_others():
    listed = re.findall(r"\]\(((?:vllm|trl)/\S+\.patch)\)", (UPSTREAM / "README.md").read_text())
    assert sorted(listed) == sorted(f"{patch.parent.name}/{patch.name}" for patch in ALL)


def test_the_backend_for_vllm_calls_what_the_library_has():
    """vllm/0004 hands calls to `delta_weight_sync.vllm.worker.call(engine, op, ...)`."""
    tree = ast.parse((installed("delta_weight_sync") / "vllm" / "worker.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    call = functions["call"].args
    assert call.args[1].arg == "op"
    assert len(call.defaults) == len(call.args) - 2, "the other arguments may be left out"
    assert call.kwarg is not None
    assert {"learn", "stage", "staged", "commit"} <= functions.keys()


@pytest.mark.long
def test_the_patches_own_tests_pass(package, tmp_path):
    link_others(package, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path)]
    command += [path for path in touched(series(package)) if path.startswith("tests/")]
    own = {"HF_HUB_OFFLINE": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
