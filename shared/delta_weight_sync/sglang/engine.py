"""A running SGLang as its follower sees it, in the process of SGLang's scheduler.

The scheduler runs what the follower asks for when no step is under way, so a commit writes while no step
reads the weights. Without overlap, that is whenever the scheduler looks for requests. With overlap, SGLang
begins the next step before it has the results of the last one. Then the scheduler waits for these results
once, before a step in which no request begins. Running requests go on with their keys and values, as in vLLM
with this library.

SGLang cannot forget cached prefixes while requests run. So from the first commit on, each request gets the
`extra_key` of the version with which it begins, and finds only prefixes of this key. Each commit makes a new
random key, also for requests that have not begun. Prefixes of old keys are never found again, and SGLang
evicts them as the least recently used ones.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from delta_weight_sync import compat
from delta_weight_sync.engine import Dtypes, Shapes
from delta_weight_sync.errors import RouteError
from delta_weight_sync.local_engine import LocalEngine, Owned, Result
from delta_weight_sync.model_config import require_same
from delta_weight_sync.sglang import hooks
from delta_weight_sync.vllm import routes

# Modules of the prefix caches that were read: they find a prefix only by its `extra_key`.
_CACHES = ("sglang.srt.mem_cache.unified_radix_cache", "sglang.srt.mem_cache.pure_swa_radix_cache")
_OTHERWISE = "serve this model with another engine"


class SglangEngine(LocalEngine):
    """The scheduler of a running SGLang."""

    what = "SGLang"

    def __init__(self, scheduler: Any, label: str) -> None:
        """`scheduler`: SGLang's scheduler, with a loaded model; `label`: that of its tokens now."""
        super().__init__(label)
        self._scheduler = scheduler
        self._calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        self._key = ""  # added to the `extra_key` of new requests

    def describe(self) -> str:
        """The release of SGLang, and how it takes commits."""
        name, version = compat.installed(hooks.SGLANG)
        return f"{name} {version}, commits between two steps"

    def alive(self) -> bool:
        """Always: the follower runs in SGLang's own process."""
        return True

    def model(self) -> torch.nn.Module:
        """The live model."""
        model: torch.nn.Module = self._scheduler.tp_worker.model_runner.model
        return model

    def serves(self, checkpoint: Path) -> bool:
        """True. Raises `EngineError` if SGLang was started with a config that computes otherwise than the
        checkpoint's."""
        config = self._scheduler.model_config
        require_same(config.model_path, config.revision, checkpoint, self.what)
        return True

    def find(self, shapes: Shapes, dtypes: Dtypes) -> tuple[dict[str, routes.Route], Owned]:
        """Find all tensors by probes that the model's own loader loads; see `vllm.routes`."""
        if reason := _unsupported(self._scheduler):
            raise RouteError(f"{reason}: {_OTHERWISE}")
        try:
            learned = routes.learn(self.model(), shapes, dtypes, self._stale)
            owned, unroutable = routes.ownership(shapes, [learned.sources])
        except RouteError as error:
            raise RouteError(_for_sglang(error)) from error
        for name, why in unroutable.items():
            raise RouteError(f"{name} cannot be changed in place ({_for_sglang(why)}): {_OTHERWISE}")
        return learned.routes, owned[0]

    def _stale(self, filled: set[int]) -> str:
        """Name a tensor that deltas would leave stale, and the fix; "" if there is none."""
        name = routes.stale(self.model(), filled).partition(":")[0]
        return name and f"{name}: SGLang computes it from the weights after loading: {_OTHERWISE}"

    def between_steps(self, call: Callable[[], Result]) -> Result:
        """Let the scheduler run `call` as soon as no step is under way."""
        done = Future[Result]()
        self._calls.put((call, done))
        return done.result()

    def ends_step(self, batch: Any) -> bool:
        """Whether the scheduler must wait for the step under way before it begins the step `batch` (None: no
        step), because calls wait."""
        return bool(not self._calls.empty() and self._under_way() and not _begins(batch))

    def run_calls(self, batch: Any = None) -> None:
        """Run what `between_steps` was given, unless a step is under way. The scheduler's thread calls this
        before it looks for requests, and before it begins the step `batch`."""
        if self._under_way() or _begins(batch):
            return
        while True:
            try:
                call, done = self._calls.get_nowait()
            except Empty:
                return
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - the follower's thread raises it
                done.set_exception(error)

    def _under_way(self) -> bool:
        """Whether the results of a step are still to come."""
        return bool(getattr(self._scheduler, "result_queue", None))

    def set_label(self, label: str) -> None:
        """Let SGLang label the tokens from here on."""
        self._scheduler.record_weight_version_change(label)
        super().set_label(label)

    def forget_prefixes(self) -> None:
        """Give a new key to later requests, and to those that have not begun."""
        before = self._key
        self._key = f"weights-{os.urandom(8).hex()}/"
        waiting = self._scheduler.waiting_queue, self._scheduler.grammar_manager.grammar_queue
        for request in itertools.chain(*waiting):
            # A running request that SGLang has put back to make room goes on with what it had.
            if not (request.kv.holds_kv or request.retraction_count):
                request.extra_key = self._key + (request.extra_key or "").removeprefix(before)

    def keyed(self, request: Any) -> Any:
        """Give a new request its key."""
        if self._key:
            request.extra_key = self._key + (request.extra_key or "")
        return request


def _begins(batch: Any) -> bool:
    """Whether requests begin with this step: the scheduler has looked for their prefixes already."""
    return batch is not None and bool(batch.forward_mode.is_extend())


def _for_sglang(reason: object) -> str:
    """`vllm.routes` finds the places in SGLang's parameters, too, and its sentences name vLLM."""
    return str(reason).replace("vLLM", "SGLang")


def _unsupported(scheduler: Any) -> str:
    """What a model or a cache has that rules out commits; "" if nothing does. See also `replica.refusal`."""
    config = scheduler.model_config
    cache = type(scheduler.tree_cache)
    if config.quantization:
        return f"SGLang has quantized it ({config.quantization})"
    if config.is_multimodal:
        return "SGLang may keep encoded images of old weights"
    if not config.is_generation:
        return "it does not generate"
    if cache.__module__ not in _CACHES:
        return f"its prefix cache is {cache.__name__}, which may keep prefixes of old weights"
    return ""
