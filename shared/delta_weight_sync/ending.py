"""Ends the process after a signal or with its parent, even while compiled code keeps all of its threads.

Python runs a signal's handler in the main thread, between two steps of Python. While the main thread waits
in compiled code, such as a request to an S3 store, no handler runs, for minutes if the store is silent. But
Python writes the signal's number to a file immediately, and a thread that reads this file can act.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # of prctl
_CLEAN_S: Final = 1.0  # seconds before the end, to remove temporary folders

groups: Final = set[int]()  # process groups that end together with this process


def end_in(seconds: float, code: int) -> None:
    """End this process after `seconds` with the exit code `code`, even if its threads still work. The process
    may end earlier in the usual way. Its temporary folders are removed, and `groups` are killed."""

    def end() -> None:
        for group in [*groups]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        atexit._run_exitfuncs()
        os._exit(code)

    last_resort = threading.Timer(seconds, os._exit, [code])  # if an exit function never returns
    for timer in (threading.Timer(seconds - _CLEAN_S, end), last_resort):
        timer.daemon = True
        timer.start()


def end_after_signals(seconds: float, codes: Mapping[int, int]) -> None:
    """From now on, end this process at most `seconds` after a signal, whatever its threads do.

    This affects only signals that have a handler in Python, as SIGINT always has; other signals end a process
    immediately. Call this function in the main thread, and once per process.

    Args:
        seconds: The time in which the signal's handler may end the process in the usual way.
        codes: Signal -> the exit code if the handler does not end the process.
    """
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    # A signal to a forked child must not end this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def wait() -> None:
        while (number := os.read(received, 1)[0]) not in codes:
            pass
        end_in(seconds, codes[number])

    threading.Thread(target=wait, name="ending", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when the thread that started it (in process `parent`) ends.

    The signal is SIGKILL: a vLLM server that waits for an engine which has already ended survives SIGTERM.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Wait until the parent of this child of `multiprocessing` ends, then kill this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
