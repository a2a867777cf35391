"""Patches that let TRL's async GRPO run on a CPU, in float32, without vLLM or a kernel from the Hub.

The patches also end the rollout process when the trainer ends. If that process fails, the trainer's error
names the cause. `install` skips a patch if this TRL lacks the code to patch (see `hooks`). Without patches,
TRL needs a GPU that FlashAttention 3 supports, the package `kernels`, the Hub, 16-bit weights and vLLM.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from delta_weight_sync import compat
from delta_weight_sync.ending import end_with_parent
from delta_weight_sync.errors import RolloutError
from delta_weight_sync.publish import adapters
from delta_weight_sync.trl import cpu, hooks, sampling

_WORKER: Any = async_rollout_worker.AsyncRolloutWorker
_CHILD_MAIN: Any = getattr(async_rollout_worker, "_child_main", None)
_INIT: Any = _WORKER.__init__
_START: Any = getattr(_WORKER, "start", None)
_CHECK_HEALTH: Any = getattr(_WORKER, "check_health", None)
_STOP: Any = getattr(_WORKER, "stop", None)
_KILLED = "it was killed, perhaps because the memory is full"
_TRAINER: Any = async_grpo_trainer.AsyncGRPOTrainer
_SYNC: Any = getattr(_TRAINER, "_sync_weight_merged", None)
_WEIGHTS: Any = getattr(_TRAINER, "_streaming_iter", None)
_SERVER_S = 240  # seconds to wait for vLLM; the same as in TRL
_replace = setattr  # tests put `monkeypatch.setattr` here, which undoes the patches


def install(*needed: compat.Feature) -> None:
    """Patch TRL in this process. Raises `CompatibilityError` if this release lacks a feature of `hooks` that
    is required or listed in `needed`."""
    compat.require(hooks.FEATURES, *needed)
    if hooks.WITHOUT_VLLM.works():
        # The rollout worker needs only HTTP, but refuses to start unless vLLM is installed. Remove this once
        # TRL requires vLLM only in `WeightTransferClient`, the one place that imports it (upstream/trl/0004).
        _replace(async_rollout_worker, "is_vllm_available", lambda *args, **kwargs: True)
    if hooks.CHILD.works():
        # TRL's rollout process does not end if the trainer is killed (kill -9). If that process fails, TRL's
        # errors do not name the cause, and TRL's `stop` may wait forever. Remove this once that process
        # watches its parent and reports all errors, and `stop` does not wait for a dead process.
        for name, method in (("start", start), ("check_health", check_health), ("stop", stop)):
            _replace(_WORKER, name, method)
    # TRL neither asks vLLM how it makes log-probabilities, nor refuses what its loss does not compute. Remove
    # this once it does both, as its synchronous trainer does the first.
    _replace(_WORKER, "__init__", init)
    if hooks.ADAPTERS.works():
        # TRL merges adapters into the base's own weights for each sync. This rounds them twice, so that the
        # base drifts. Remove this once TRL sends merged copies.
        _replace(_TRAINER, "_sync_weight_merged", sync_weights)
        _replace(_TRAINER, "_streaming_iter", weights)
    if hooks.ATTENTION.works():
        from trl.experimental.async_grpo import packing

        # Tree packing downloads FlashAttention 3, which works only on some GPUs, and only in 16 bits.
        # Remove this once TRL uses PyTorch's own attention without the package `kernels` (upstream/trl/0005).
        _replace(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=cpu.attention))
        # TRL looks up the peak throughput by the name of the GPU, which a CPU does not have. Remove this once
        # `get_peak_flops_per_device` returns None on a CPU, as for an unknown GPU (upstream/trl/0003).
        _replace(async_grpo_trainer, "get_peak_flops_per_device", cpu.peak_flops)


def sync_weights(trainer: Any, started: float) -> Any:
    """Make a sync in which TRL does not merge adapters into the base."""
    with adapters.kept_apart(trainer.accelerator.unwrap_model(trainer.model)):
        return _SYNC(trainer, started)


def weights(trainer: Any) -> Any:
    """What a trainer sends at a sync: merged copies of a model's tensors if it has adapters. Raises
    `ConfigError` if an adapter cannot be merged exactly."""
    model = adapters.adapted(trainer.accelerator.unwrap_model(trainer.model), whole=True)
    return model if isinstance(model, adapters.Merged) else _WEIGHTS(trainer)


def play_rollouts(messages: Connection, *arguments: Any) -> None:
    """Replace the main function of TRL's rollout process: end when the trainer ends, and send this process's
    number, then any error."""
    messages.send(os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the trainer ends this process (`stop`)
    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    try:
        _CHILD_MAIN(*arguments)
    except Exception as error:
        messages.send(f"{type(error).__name__}: {error}")
        raise


def init(worker: Any, *args: Any, **options: Any) -> None:
    """Make TRL's rollout worker. Raises `ConfigError` for sampling whose ratios TRL cannot compute."""
    sampling.require_exact(options)
    _INIT(worker, *args, **options)
    worker.settings = options


def start(worker: Any) -> None:
    """Start the rollout process once vLLM answers. Raises `RolloutError` with the cause if that fails, and
    `ConfigError` if vLLM's log-probabilities would make ratios wrong."""
    settings = getattr(worker, "settings", {})  # none if it was made before `install`
    if url := settings.get("vllm_server_url"):
        _await_server(url)
        sampling.require_replica(settings, url, _SERVER_S)
    messages, sender = multiprocessing.Pipe(duplex=False)
    _replace(async_rollout_worker, "_child_main", functools.partial(play_rollouts, sender))
    try:
        _START(worker)
    except RuntimeError as error:
        cause = str(error).replace("Check the child's stderr for the traceback", "See the lines above")
        if f"exitcode=-{signal.SIGKILL}" in cause:
            cause = _KILLED
        sender.close()  # so that the process's end is seen
        with contextlib.suppress(EOFError):
            while messages.poll(1.0):
                if isinstance(said := messages.recv(), str):
                    cause = said
        raise RolloutError(f"the process that collects rollouts did not start: {cause}") from error
    finally:
        _replace(async_rollout_worker, "_child_main", _CHILD_MAIN)
    if messages.poll():  # not if it ran already
        number = messages.recv()
        children = (child for child in multiprocessing.active_children() if child.pid == number)
        worker.process = next(children, None)  # None if it has ended: TRL's `check_health` says so


def _await_server(url: str) -> None:
    # As in TRL's rollouts, the environment's proxy is not used. It could not reach a vLLM on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _SERVER_S
    said = False
    while True:
        try:
            opener.open(f"{url.rstrip('/')}/health", timeout=5.0).close()
            return
        except (OSError, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                return  # a proxy answered, and blocks this path: vLLM may be there
            if time.monotonic() > deadline or not url.startswith(("http://", "https://")):
                raise RolloutError(
                    f"no vLLM answers at {url} ({error}): start it, or correct vllm_server_base_url"
                ) from error
            if not said:
                print(f"waiting up to {_SERVER_S} s for vLLM at {url}: {error}", file=sys.stderr, flush=True)
            said = True
            time.sleep(1.0)


def check_health(worker: Any, stale_after_s: float) -> None:
    """Raise `RolloutError` with the cause if the rollout process failed or hangs."""
    try:
        _CHECK_HEALTH(worker, stale_after_s)
        process = getattr(worker, "process", None)
        code = process and process.exitcode
        if code and code != -signal.SIGTERM:  # perhaps the trainer was sent the same signal
            raise RuntimeError(_KILLED if code == -signal.SIGKILL else f"it ended with exit code {code}")
    except RuntimeError as error:
        cause = str(error.__cause__ or error).splitlines()[0]  # the child's traceback follows
        raise RolloutError(f"the process that collects rollouts failed: {cause}") from error


def stop(worker: Any) -> None:
    """End the rollout process within a second."""
    # If a child died while it waited for TRL's event, TRL's method waits forever, so a thread calls it.
    stopping = threading.Thread(target=_STOP, args=[worker], daemon=True)
    stopping.start()
    stopping.join(1.0)
    if process := getattr(worker, "process", None):
        process.kill()  # a child with unread samples does not exit by itself
        process.join()
        worker.process = None
    stopping.join(1.0)
