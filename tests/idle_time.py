"""`run` a coroutine in a loop whose clock stands still while anything can happen, and jumps when nothing can.

A minute's patience then takes no time, and never ends before all that could be done was done.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout and 0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._idle = _Jumping()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, for work that waits for nothing outside of its loop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
