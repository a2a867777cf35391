"""Ends a process together with the process that started it: vLLM's processes, and those of `make demo`.

A request to stop is not enough: a server may be waiting for an engine that has already ended.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Linux: let the kernel kill this process when the thread of process `parent` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
