"""A part of the play in a process of its own, which may die at any time."""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")


class Died(Exception):  # noqa: N818
    """The process ended before it answered."""


class Failed(Exception):  # noqa: N818
    """The part raised an error; `kind` is its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def prepare() -> None:
    """Start the process that all parts are forked from: it has imported and compiled what they need."""
    _CONTEXT.set_forkserver_preload(["tests.chaos.warm"])
    process = _CONTEXT.Process(target=time.time)
    process.start()
    process.join(PATIENCE_S)


class Actor:
    """`role(*arguments)` in a process of its own; its methods are called by name."""

    def __init__(self, role: Callable[..., Any], *arguments: Any, environ: Mapping[str, str]) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_serve, args=(theirs, dict(environ), role, arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns; raises `Failed`, or `Died`, also for no answer in time."""
        self.send(method, *arguments)
        return self.answer()

    def send(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead: `answer` says so
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(PATIENCE_S):
                raise Died(f"no answer in {PATIENCE_S:.0f} s")
            kind, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise Died("it ended") from None
        if kind:
            raise Failed(kind, answer)
        return answer

    def signal(self, how: signal.Signals) -> None:
        if self.alive and self.process.pid:
            os.kill(self.process.pid, how)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self._release()

    def close(self) -> None:
        """Let it end by itself; kill it if it does not."""
        with contextlib.suppress(Died, Failed):
            self.call("close")
        self.send("")
        self.process.join(PATIENCE_S)
        hangs = self.alive
        self.kill() if hangs else self._release()
        assert not hangs, "a process did not end although it was asked to"

    def _release(self) -> None:
        self._pipe.close()
        self.process.close()


def _serve(pipe: Connection, environ: dict[str, str], role: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environ)
    logging.disable()  # the director prints each fault
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the director, who then ends all
    part = role(*arguments)
    while True:
        try:
            method, words = pipe.recv()
        except (EOFError, ConnectionError):
            method = ""
        if not method:
            return
        try:
            pipe.send(("", getattr(part, method)(*words)))
        except Exception as error:  # noqa: BLE001 - the director judges it
            pipe.send((type(error).__name__, str(error)))


class Local:
    """The same in this process."""

    alive = True

    def __init__(self, part: Any) -> None:
        self.part = part

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.part, method)(*arguments)

    def close(self) -> None:
        self.part.close()
