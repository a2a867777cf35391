"""The folders that become the Spaces' repositories: what their Dockerfiles need, and nothing else.

A package's files are its modules and the data files that pyproject.toml names for it, so what runs from an
installation runs from a Space as well; caches, tests and other apps cannot slip in.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trainer.deploy.errors import DeployError

App = Literal["env", "replica"]
APPS: tuple[App, ...] = ("env", "replica")

CHECKOUT = Path(__file__).parents[2]
_PACKAGES: dict[App, tuple[str, ...]] = {"env": ("env_space",), "replica": ("inference_space", "shared")}
_ROOT_FILES: dict[App, tuple[str, ...]] = {"env": ("LICENSE",), "replica": ("LICENSE", "pyproject.toml")}
_SPACE_FILES = ("README.md", "Dockerfile", "requirements.txt")  # at the root of the Space


def stage(app: App, out: Path) -> None:
    """Write the repository of this Space to `out`; a pure function of the checkout."""
    for name, source in files(app).items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def files(app: App) -> dict[str, Path]:
    """Path in the Space's repository -> file of the checkout, sorted."""
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise DeployError("deploy uploads a checkout's files: run it from a clone of the repository")
    found = {name: CHECKOUT / name for name in _ROOT_FILES[app]}
    found |= {name: CHECKOUT / _PACKAGES[app][0] / name for name in _SPACE_FILES}
    for package in _PACKAGES[app]:
        found |= {path.relative_to(CHECKOUT).as_posix(): path for path in _of_package(package)}
    return dict(sorted(found.items()))


def _of_package(package: str) -> Iterator[Path]:
    """Modules and named data files of a package and of the packages in it."""
    yield from (CHECKOUT / package).rglob("*.py")
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    for name, patterns in settings["tool"]["setuptools"]["package-data"].items():
        if name.split(".")[0] == package:
            folder = CHECKOUT.joinpath(*name.split("."))
            yield from (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
