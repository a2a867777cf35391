"""The folders that become the Spaces' repositories: what their Dockerfiles need, and nothing else.

A package's files are its modules and the data files that are named here for it, as far as git tracks them;
caches, tests, other apps, and whatever else lies about in a checkout cannot slip in.
"""

from __future__ import annotations

import shutil
import subprocess
from fnmatch import fnmatch
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
_SPACE_FILES = ("README.md", "Dockerfile", "requirements.lock")  # at the root of the Space


def stage(app: App, out: Path) -> None:
    """Write the repository of this Space to `out`; a pure function of the checkout."""
    for name, source in files(app).items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def files(app: App) -> dict[str, Path]:
    """Path in the Space's repository -> file of the checkout, sorted.

    Raises `DeployError` for a link, and for a file that belongs there and is new to git.
    """
    tracked = _git("--cached")
    names = {name: name for name in _ROOT_FILES[app]}
    names |= {name: f"{_PACKAGES[app][0]}/{name}" for name in _SPACE_FILES}
    names |= {name: name for name in _of_packages(app, tracked)}
    unknown = {*names.values()}.difference(tracked).union(_of_packages(app, _git("--others")))
    if unknown:
        raise DeployError(f"git does not track {', '.join(sorted(unknown))}: `git add` or remove it")
    return {name: _plain(CHECKOUT / path) for name, path in sorted(names.items())}


def _of_packages(app: App, names: list[str]) -> list[str]:
    """Modules and named data files of the app's packages and of the packages in them."""
    patterns = [f"{package}/{pattern}" for package in _PACKAGES[app] for pattern in ("*.py", *_DATA[package])]
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _git(which: str) -> list[str]:
    """The files of the checkout that git tracks (`--cached`), or that are new to it (`--others`)."""
    command = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--exclude-standard", which]
    try:
        listed = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise DeployError("deploy uploads what git tracks: install git") from None
    if listed.returncode:
        said = " ".join(listed.stderr.split())
        raise DeployError(f"deploy uploads what git tracks: run it from a clone of the repository ({said})")
    return listed.stdout.split("\0")[:-1]


def _plain(path: Path) -> Path:
    """The path, if it is a file of the checkout itself."""
    if path.resolve() != CHECKOUT.resolve() / path.relative_to(CHECKOUT):
        raise DeployError(f"{path} is a link, or lies behind one: put the file itself there")
    if not path.is_file():
        raise DeployError(f"{path} is missing: `git restore` it, or `git rm` it")
    return path
