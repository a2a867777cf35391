"""How a test waits for what must come."""

import time
from collections.abc import Callable

PATIENCE_S = 240.0  # for what takes moments; only a fault takes so long


def soon(reached: Callable[[], object], what: str | Callable[[], object] = "") -> None:
    """Wait until `reached`; if that never comes, fail with `what`."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)
