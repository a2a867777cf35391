"""The following half, inside vLLM: from versions in the bucket to live parameters."""

import ctypes
import os
import signal

METHOD = "delta_weight_sync"  # what the plugin gives to every worker of vLLM: see `worker`
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Linux: let the kernel kill this process when the thread of process `parent` that started it ends.

    A request to stop is not enough: a server may be waiting for an engine that has already ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
