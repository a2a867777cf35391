"""The folders that become the Spaces' repositories: what their Dockerfiles need, and nothing else.

A package's files are its modules and the data files that are named here for it; caches, tests and other apps
cannot slip in.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trainer.deploy.errors import DeployError

App = Literal["env", "replica"]
APPS: tuple[App, ...] = ("env", "replica")

CHECKOUT = Path(__file__).parents[2]
_PACKAGES: dict[App, tuple[str, ...]] = {
    "env": ("env_space",),
    "replica": ("inference_space", "shared/delta_weight_sync"),
}
_DATA = {
    "env_space": ("words/*", "page/*", "openenv.yaml", "openenv_probe.json"),
    "inference_space": ("engine_python.sh", "dashboard/static/*", "dashboard/templates/*"),
    "shared/delta_weight_sync": ("py.typed",),
}
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
    found = (path for pattern in _DATA[package] for path in (CHECKOUT / package).glob(pattern))
    yield from (path for path in found if path.is_file())
