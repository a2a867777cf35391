"""A worker's half of a sync: stage a version while vLLM generates, commit it between two of its steps.

The plugin gives every worker of vLLM one method, which the follower calls by `collective_rpc` on all of them:

    delta_weight_sync(op="learn", shapes={...})                -> {"digest"}  of the weights that are live
    delta_weight_sync(op="stage", deltas=[...])                -> {}          begins, in a thread
    delta_weight_sync(op="stage", checkpoint="folder")         -> {}          the same, from whatever is live
    delta_weight_sync(op="staged")                             -> {"done", "stage_s"}
    delta_weight_sync(op="commit", digest=..., label=...)      -> {"commit_s", "waited_s", "pause_s"}

An answer is plain data, as vLLM's messages are; {"error", "kind"} is one that failed. A commit whose digest
would be wrong writes nothing; one that fails on any worker is put back bit for bit on all of them. For
`waited_s` the writing stood behind the step that was under way when the commit came: that is no pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.digest import to_hex
from delta_weight_sync.vllm import cpu_backend, staging, weight_map
from delta_weight_sync.vllm.loader_trace import RouteError
from delta_weight_sync.vllm.ranks import Ranks
from delta_weight_sync.vllm.reloaded import Fallback
from delta_weight_sync.vllm.staging import LiveWeights, Staged

Answer = dict[str, Any]
Shapes = dict[str, list[int]]
log = logging.getLogger("delta_weight_sync")


class DeltaWorker:
    """What one worker of vLLM keeps between two calls."""

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's, with a loaded model. To be made by all workers at once."""
        parallel = worker.vllm_config.parallel_config
        if parallel.data_parallel_size != 1:
            raise RouteError(
                "a mixture of experts whose engines compute together (--data-parallel-size) cannot take a"
                " commit between two steps of all of them; start one replica per copy"
            )
        if parallel.enable_eplb:
            raise RouteError("--enable-eplb moves experts away from where deltas go; start vLLM without it")
        self._model, self._checkpoint = worker.get_model(), worker.vllm_config.model_config.model
        if next(self._model.parameters()).device.type == "cpu":
            cpu_backend.self_test(self._model)
        self._ranks = Ranks(parallel.world_size)
        self._staged, self._digest = Staged(), 0
        self._staging: threading.Thread | None = None
        self._answer: Answer = {}

    def learn(self, shapes: Shapes) -> Answer:
        """Learn where the tensors of a run (checkpoint name -> shape) are in the model's parameters."""
        learned = weight_map.learn(self._model, shapes)
        owned, unroutable = weight_map.ownership(shapes, self._ranks.gather(learned.sources()))
        for name, reason in unroutable.items():
            log.warning("%s is loaded anew by each commit, which is slow: %s", name, reason)
        loaded = checkpoint.read_bits(_folder(self._checkpoint)) if unroutable else ()
        fallback = Fallback(self._model, {name: bits for name, bits in loaded if name in unroutable})
        self._weights = LiveWeights(learned.routes, owned[self._ranks.rank], fallback, self._ranks)
        self._staged, self._digest = Staged(), self._weights.digest()
        return {"digest": to_hex(self._digest)}

    def stage(self, deltas: Sequence[str] = (), checkpoint: str = "") -> Answer:
        """Begin to prepare a commit: of delta files in order, or of what differs from a checkpoint."""
        self._staged = Staged()
        paths = [Path(path) for path in deltas]
        work = partial(self._weights.stage, paths, self._digest)
        if checkpoint:
            work = partial(self._weights.stage_checkpoint, Path(checkpoint))
        self._staging = threading.Thread(target=self._stage, args=(work,), name="stage", daemon=True)
        self._staging.start()
        return {}

    def _stage(self, work: Callable[[], Staged]) -> None:
        started = time.perf_counter()
        try:
            self._staged = work()
            self._answer = {"done": True, "stage_s": time.perf_counter() - started}
        except Exception as error:  # noqa: BLE001 - it is the answer
            self._answer = failed(error)

    def staged(self) -> Answer:
        """Whether staging has ended, and how long it took."""
        if self._staging is None or self._staging.is_alive():
            return {"done": False}
        return self._answer

    @torch.no_grad()
    def commit(self, digest: str, label: str) -> Answer:
        """Write what is staged if it leads to `digest`; `label` is for vLLM's scheduler (`step_commit`)."""
        started = time.perf_counter()
        staged, self._staged = self._staged, Staged()
        if to_hex(staged.digest) != digest:
            raise codec.CodecError(
                f"the delta leads to digest {to_hex(staged.digest)}, published was {digest}"
            )
        staging.commit(staged.steps, self._ranks.agree)
        self._digest = staged.digest
        waited_s = sum(step.waited_s for step in staged.steps)
        return {"commit_s": time.perf_counter() - started - waited_s, "waited_s": waited_s}


def call(worker: Any, op: str, **arguments: Any) -> Answer:
    """The method that the plugin gives to vLLM's worker class; never raises."""
    try:
        if op == "learn" and not hasattr(worker, "_delta_worker"):
            worker._delta_worker = DeltaWorker(worker)
        answer: Answer = getattr(worker._delta_worker, op)(**arguments)
    except Exception as error:  # noqa: BLE001 - it is the answer
        return failed(error)
    return answer


def _folder(checkpoint: str) -> Path:
    """What vLLM loaded: a folder, or a model of the Hub, which is in the local cache."""
    return Path(
        checkpoint if Path(checkpoint).is_dir() else snapshot_download(checkpoint, local_files_only=True)
    )


def failed(error: Exception) -> Answer:
    """The answer of a call that raised."""
    return {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
