"""A request to end is an exit like any other, so that temporary folders are removed."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def exit_when_asked() -> None:
    """Call it before a server of uvicorn's, which raises SIGTERM once more when it has stopped."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
