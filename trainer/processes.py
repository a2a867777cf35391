"""Child processes of the local run: each with its log, all of them stopped together."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from delta_weight_sync.vllm.lifeline import end_with_parent

_PATIENCE_S = 15.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class ChildError(RuntimeError):
    """A child process ended although it was needed; the message names its log."""


class Processes:
    """Starts `python -m <module>` children; leaving the block stops them and all their descendants.

    The kernel ends the children of a process that is killed, and they end theirs by the same means.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._passing: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self, name: str, arguments: list[str], environment: Mapping[str, str], *, passing: bool = False
    ) -> None:
        """Run `python -m <arguments>` with the given variables on top of this process's.

        `passing`: it has an end of its own; any other child is needed for as long as the block lasts.
        """
        self._passing |= {name} if passing else set()
        with self.log(name).open("wb") as log, _later():
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us only; we stop the children in order
                preexec_fn=partial(end_with_parent, os.getpid()),  # unless we are killed
            )

    def log(self, name: str) -> Path:
        """Where the child's output goes."""
        return self._folder / f"{name}.log"

    def finished(self, name: str) -> bool:
        """True once that child ended well; raises `ChildError` if it, or any other child, failed."""
        for other, child in self._children.items():
            code = child.poll()
            if code is not None and (code != 0 or other not in self._passing):
                raise ChildError(
                    f"{other} stopped (exit code {code}); the reason is at the end of {self.log(other)}"
                )
        return self._children[name].poll() == 0

    def stop(self) -> None:
        """Ask everything to end, then make it; whoever asks us to end meanwhile has to wait for that."""
        with _deaf():
            running = [psutil.Process(c.pid) for c in self._children.values() if c.poll() is None]
            family = running + [p for child in running for p in _descendants(child)]
            for process in running:
                _quietly(process.terminate)
            _, alive = psutil.wait_procs(family, timeout=_PATIENCE_S)
            for process in alive:
                _quietly(process.kill)
            for child in self._children.values():
                child.wait()
            self._children.clear()


def interrupt_once() -> None:
    """Ctrl-C and the request to end raise `KeyboardInterrupt`, the first time only: a second one, from an
    impatient user or from `make`, must not interrupt the cleaning up.
    """

    def interrupt(*_: object) -> None:
        for sign in _ENDING:
            signal.signal(sign, signal.SIG_IGN)
        raise KeyboardInterrupt

    for sign in _ENDING:
        signal.signal(sign, interrupt)


@contextmanager
def _later() -> Iterator[None]:
    """Whoever asks us to end meanwhile is heard after the block: a child half started would be lost."""
    asked: list[int] = []
    before = {sign: signal.signal(sign, lambda number, _: asked.append(number)) for sign in _ENDING}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    for sign in asked[:1]:
        signal.raise_signal(sign)


@contextmanager
def _deaf() -> Iterator[None]:
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in _ENDING}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def free_port(wanted: int = 0) -> int:
    """`wanted`, or any free port of the loopback interface; raises `ChildError` if it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            raise ChildError(
                f"port {wanted} is in use; choose another, for example: make demo PORT={wanted + 1}"
            ) from None
        return int(probe.getsockname()[1])


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; raises `ChildError` while another one holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ChildError(f"another demo runs in {folder}; end it first (Ctrl-C)") from None
        yield


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _quietly(action: object) -> None:
    try:
        action()  # type: ignore[operator]
    except psutil.NoSuchProcess:
        return
