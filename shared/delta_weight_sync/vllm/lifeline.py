"""No process outlives the one that started it, however that one ended: those of vLLM, and of `make demo`.

A request to end is not enough: a server that is asked in the middle of a request may wait for an answer that
an engine which ended before it will never give.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Linux: let the kernel kill this process when the thread of process `parent` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
