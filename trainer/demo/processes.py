"""Child processes of the demo: each has its own log, and all of them are stopped together."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil

from delta_weight_sync.ending import die_with_parent

_TIMEOUT_S = 15.0  # time for the children to end after SIGTERM
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ChildError(RuntimeError):
    """The demo cannot start or go on. If a child process ended, the message names the log of that child."""


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Starts `python -m <module>` children; leaving the block stops those that run, and their descendants.

    If this process is killed, the kernel kills its children, but not the children of these children. So each
    child must ensure that its own children end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._may_end: set[str] = set()

    def start(
        self, name: str, arguments: list[str], env: Mapping[str, str], *, may_end: bool = False, nice: int = 0
    ) -> None:
        """Run `python -m <arguments>`, with `env` added to this process's variables. `may_end`: the child may
        end before the block ends. `nice`: how far to lower the child's priority."""
        self._may_end |= {name} if may_end else set()
        with self.log(name).open("wb") as log, _signals_delayed():
            self._children[name] = subprocess.Popen(
                ["nice", f"-n{nice}", sys.executable, "-m", *arguments],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # With a process group of its own, a child gets no Ctrl-C: this process gets it, and stops the
                # children. The child gets no session of its own, because Linux compares the nice values of
                # processes only within a session (autogroup).
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def finished(self, name: str) -> bool:
        """Whether child `name` ended well. Raises `ChildError` if any child failed or ended too early."""
        for other, child in self._children.items():
            code = child.poll()
            if code is not None and (code != 0 or other not in self._may_end):
                log = self.log(other)
                raise ChildError(f"{other} stopped (exit code {code}); the reason is at the end of {log}")
        return self._children[name].poll() == 0

    def __exit__(self, *_: object) -> None:
        with _signals_delayed():
            running = [child for child in self._children.values() if child.poll() is None]
            family = [psutil.Process(child.pid) for child in running]
            family += [other for process in family for other in process.children(recursive=True)]
            for child in running:
                child.terminate()
            for process in psutil.wait_procs(family, timeout=_TIMEOUT_S)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for child in running:
                child.wait()


def interrupt_once() -> None:
    """Let the first SIGINT or SIGTERM raise `KeyboardInterrupt`, and ignore later ones: a second signal, from
    an impatient user or from `make`, must not interrupt the cleanup."""

    def interrupt(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _SIGNALS:
        signal.signal(number, interrupt)


@contextlib.contextmanager
def _signals_delayed() -> Iterator[None]:
    """Deliver the first signal after the block, so no signal interrupts a child's start or the cleanup."""
    received: list[int] = []
    before = [(n, signal.signal(n, lambda number, _: received.append(number))) for n in _SIGNALS]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)
    for first in received[:1]:
        signal.raise_signal(first)


def free_port(wanted: int = 0) -> int:
    """Return port `wanted`, or any free port if `wanted` is 0. Raises `ChildError` if `wanted` is taken."""
    try:
        with socket.create_server(("127.0.0.1", wanted)) as probe:  # also binds a port that was just released
            return int(probe.getsockname()[1])
    except OSError:
        fix = f"choose another, for example: make demo PORT={wanted + 1}"
        raise ChildError(f"port {wanted} is in use; {fix}") from None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process; raises `ChildError` while another process holds the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ChildError(f"another demo runs in {folder}; end it first (Ctrl-C)") from None
        yield
