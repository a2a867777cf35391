"""A package with patches applied: links to the installed one, and copies of what the patches touch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

UPSTREAM = Path(__file__).parents[2] / "upstream"


def series(package: str) -> list[Path]:
    """The patches of a package, in their order."""
    return sorted((UPSTREAM / package).glob("*.patch"))


def installed(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def touched(patches: Iterable[Path]) -> list[str]:
    """The files that patches change or create, as paths in the package's repository."""
    found = (re.findall(r"^diff --git a/(\S+) b/", patch.read_text(), re.MULTILINE) for patch in patches)
    return sorted({path for paths in found for path in paths})


def apply(patches: Sequence[Path], folder: Path) -> None:
    """Apply patches, one after the other; raises `AssertionError` with git's words if one does not fit."""
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        command = ["git", "apply", "--verbose", str(patch)]
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
    """Link the rest of the installed package beside the files that are already under `folder`."""
    here = installed(package)
    for parent in [folder / package, *(path for path in (folder / package).rglob("*") if path.is_dir())]:
        original = here / parent.relative_to(folder / package)
        for entry in original.iterdir() if original.exists() else ():
            if entry.name != "__pycache__" and not (parent / entry.name).exists():
                (parent / entry.name).symlink_to(entry)
