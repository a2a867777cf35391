"""The part of the library that runs inside vLLM and brings versions from the bucket into live parameters."""

import ctypes
import os
import signal
from typing import Any

from delta_weight_sync import compat
from delta_weight_sync.vllm import hooks

METHOD = "delta_weight_sync"  # name of the method that the plugin adds to every vLLM worker: see `worker`
PAUSE = "DELTA_WEIGHT_SYNC_PAUSE"
_PR_SET_PDEATHSIG = 1


def commits_between_steps() -> bool:
    """Whether this vLLM takes commits between two steps. Otherwise the follower pauses vLLM to commit. Raises
    `CompatibilityError` if this vLLM can do neither."""
    if hooks.IN_STEP.works() and not compat.is_set(PAUSE):
        return True
    hooks.PAUSED.require()
    return False


def takes_images(model_config: Any) -> bool:
    """Whether a model takes images or other media; in vLLM 0.29 and 0.30, whether its class can take them."""
    return bool(getattr(model_config, "supports_multimodal_inputs", model_config.is_multimodal_model))


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when the thread that started it (in process `parent`) ends.

    The signal is SIGKILL: a vLLM server that waits for an engine which has already ended survives SIGTERM.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
