"""Patches that let TRL's async GRPO run on a CPU, in float32, without vLLM or a kernel from the Hub.

The patches also end the rollout process when the trainer ends. If that process fails, the trainer's error
names the cause. `install` skips a patch if this TRL lacks the code to patch (see `hooks`). Without patches,
TRL needs a GPU that FlashAttention 3 supports, the package `kernels`, the Hub, 16-bit weights and vLLM.
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from delta_weight_sync import compat
from delta_weight_sync.errors import RolloutError
from delta_weight_sync.trl import hooks

_WORKER: Any = async_rollout_worker.AsyncRolloutWorker
_CHILD_MAIN: Any = getattr(async_rollout_worker, "_child_main", None)
_START: Any = getattr(_WORKER, "start", None)
_CHECK_HEALTH: Any = getattr(_WORKER, "check_health", None)
_PEAK_FLOPS: Any = getattr(async_grpo_trainer, "get_peak_flops_per_device", None)
_KILLED = "it was killed, perhaps because the memory is full"
_SERVER_S = 240  # seconds to wait for vLLM; the same as in TRL
_replace = setattr  # tests put `monkeypatch.setattr` here, which undoes the patches
# Before 2.12, torch has no such argument, and its kernel takes fewer key heads without being asked.
_GQA: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _GQA["enable_gqa"] = True
_ROUNDING = 0.1  # in `_require_same_mask`: 16-bit rounding changes results by 0.01, another mask by 1


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
        _replace(async_rollout_worker, "_child_main", play_rollouts)
        for name, method in (("start", start), ("check_health", check_health), ("stop", stop)):
            _replace(_WORKER, name, method)
    if hooks.ATTENTION.works():
        from trl.experimental.async_grpo import packing

        # Tree packing downloads FlashAttention 3, which works only on some GPUs, and only in 16 bits.
        # Remove this once TRL uses PyTorch's own attention without the package `kernels` (upstream/trl/0005).
        _replace(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_varlen_attention))
        # TRL looks up the peak throughput by the name of the GPU, which a CPU does not have. Remove this once
        # `get_peak_flops_per_device` returns None on a CPU, as for an unknown GPU (upstream/trl/0003).
        _replace(async_grpo_trainer, "get_peak_flops_per_device", _peak_flops)


def play_rollouts(*arguments: Any) -> None:
    """Replace the main function of TRL's rollout process: report any error, and end when the trainer ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the trainer ends this process (`stop`)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        _CHILD_MAIN(*arguments)
    except Exception as error:
        *_, failures, _ = arguments  # TRL's queue for errors in rollouts
        failures.put((type(error).__name__, str(error), ""))
        raise


def start(worker: Any) -> None:
    """Start the rollout process once vLLM answers. Raises `RolloutError` with the cause if that fails."""
    if url := worker._loop_kwargs.get("vllm_server_url"):
        _await_server(url)
    try:
        _START(worker)
    except RuntimeError as error:
        cause = str(error).replace("Check the child's stderr for the traceback", "See the lines above")
        if f"exitcode=-{signal.SIGKILL}" in cause:
            cause = _KILLED
        with contextlib.suppress(queue.Empty):
            name, message, _ = worker._exception_info_queue.get(timeout=1.0)
            cause = f"{name}: {message}"
        raise RolloutError(f"the process that collects rollouts did not start: {cause}") from error


def _await_server(url: str) -> None:
    # As in TRL's rollouts, the environment's proxy is not used. It could not reach a vLLM on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline, said = time.monotonic() + _SERVER_S, False
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
        code = worker._process and worker._process.exitcode
        if code and code != -signal.SIGTERM:  # perhaps the trainer was sent the same signal
            raise RuntimeError(_KILLED if code == -signal.SIGKILL else f"it ended with exit code {code}")
    except RuntimeError as error:
        cause = str(error.__cause__ or error).splitlines()[0]  # the child's traceback follows
        raise RolloutError(f"the process that collects rollouts failed: {cause}") from error


def stop(worker: Any) -> None:
    """End the rollout process within a second."""
    process, worker._process = worker._process, None
    if process and process.is_alive():
        # If a child died while it waited for this event, `set` blocks forever, so a thread calls `set`.
        threading.Thread(target=worker._stop_event_mp.set, daemon=True).start()
        process.join(1.0)
        process.kill()  # a child with unread samples does not exit by itself
        process.join()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _peak_flops(accelerator: Any, dtype: str) -> float | None:
    return _PEAK_FLOPS(accelerator, dtype) if accelerator.device.type == "cuda" else None


def _varlen_attention(
    *packed: Any,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Do what FlashAttention's varlen function does: with `varlen_attn` for 16 bits on a GPU, else with SDPA.

    `packed`: q [queries, heads, head_dim]; k and v [keys, heads or fewer, head_dim]; cumulative lengths of
    the sequences in q, then in k (int32 [sequences + 1]); the longest length in q, then in k. The last query
    of a sequence has the position of the sequence's last key. Each query sees the key at its own position and
    `window_size[0]` keys before that (-1: all).
    """
    if softcap or not causal:
        raise ValueError("this attention is always causal and has no soft caps: train another model")
    if _kernel_takes(packed[0]):
        _require_same_mask(packed[0].device)
        return _kernel(*packed, scale=softmax_scale, before=window_size[0])
    return _one_by_one(*packed, scale=softmax_scale, before=window_size[0])


def _kernel_takes(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def _require_same_mask(device: torch.device) -> None:
    """Raise `RuntimeError` unless the kernel masks as `_one_by_one` does. Runs once per device."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=random).to(device).bfloat16() for shape in ((3, 4, 16), (7, 2, 16)))
    starts = torch.tensor([[0, 1, 3], [0, 3, 7]], dtype=torch.int32).to(device)
    for before in (-1, 1):
        theirs = _kernel(q, k, k, *starts, 2, 4, scale=None, before=before)
        ours = _one_by_one(q, k, k, *starts, 2, 4, scale=None, before=before)
        if not torch.allclose(theirs, ours, rtol=0.0, atol=_ROUNDING):
            raise RuntimeError(
                f"torch {torch.__version__} masks attention unlike FlashAttention: pip install torch==2.13.0"
            )


def _kernel(*packed: Any, scale: float | None, before: int) -> torch.Tensor:
    out = varlen_attn(*packed, scale=scale, window_size=(before, 0), **_GQA)
    assert isinstance(out, torch.Tensor)  # `varlen_attn` returns a pair only with `return_aux`
    return out


def _one_by_one(*packed: Any, scale: float | None, before: int) -> torch.Tensor:
    q, k, v, starts_q, starts_k, *_ = packed
    queries, keys = starts_q.diff().tolist(), starts_k.diff().tolist()  # lengths of the sequences
    # Use `split`, because the gradient of a slice would be as large as the whole tensor.
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_attend(*part, scale, before) for part in parts])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, before: int
) -> torch.Tensor:
    mask, ahead = None, len(k) - len(q)
    if ahead or before >= 0:  # bool [queries, keys]: which keys each query sees
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(ahead)
        mask = mask if before < 0 else mask.triu(ahead - before)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # heads first
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)
