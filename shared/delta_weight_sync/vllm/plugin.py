"""The `vllm.general_plugins` entry point, which makes stock vLLM able to take commits.

If the variable VLLM_PLUGINS is not set, vLLM loads every installed plugin. This plugin patches vLLM. So
unless VLLM_PLUGINS names it, it only registers the weight transfer backend, which then says what is missing.
"""

import functools
import logging
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

from delta_weight_sync import compat
from delta_weight_sync.ending import die_with_parent
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm import BACKEND as NAME
from delta_weight_sync.vllm import METHOD, commits_between_steps, hooks, is_named

if TYPE_CHECKING:
    from delta_weight_sync.vllm.worker import DeltaWorker

_log = logging.getLogger(NAME)


def register() -> None:
    """Patch this process of vLLM. vLLM may call `register` more than once. Raises `CompatibilityError` if
    vLLM lacks what the plugin needs; exits if the run's settings are wrong."""
    if not _log.handlers:  # vLLM's server would drop our log lines, so use vLLM's handler
        _log.parent = logging.getLogger("vllm")
    parent = multiprocessing.parent_process()
    if hooks.TRANSFER.works():
        _register_backend()
    if not is_named():
        if "DELTA_WEIGHT_SYNC_RUN" in os.environ and parent is None:
            _log.warning("this vLLM follows no run: DELTA_WEIGHT_SYNC_RUN also needs VLLM_PLUGINS=%s", NAME)
        return
    # By default, a Python thread runs for 5 ms while others wait. vLLM's processes have several busy threads,
    # so the follower, staging or generation could wait that long before each short call.
    sys.setswitchinterval(0.0005)
    if parent is None and "DELTA_WEIGHT_SYNC_RUN" in os.environ:
        from delta_weight_sync.vllm.server import check, settings_from

        try:
            check(settings_from(os.environ))
        except DeltaWeightSyncError as error:  # one sentence, before this process loads the engine
            sys.exit(f"{NAME}: {error}")
    if parent is None:
        compat.require(hooks.FEATURES)  # a child imports only what its own patches need
    hooks.WORKER.require()
    from vllm.v1.worker.worker_base import WorkerBase

    from delta_weight_sync.vllm import routes

    if parent and parent.pid:  # this is vLLM's engine or a worker, not the server
        die_with_parent(parent.pid)
    setattr(WorkerBase, METHOD, _call)
    if commits_between_steps():
        from delta_weight_sync.vllm import _step_commit

        _step_commit.install()
    if hooks.DERIVED.works():  # for models that keep tensors besides their parameters
        routes.install()
    if hooks.CPU.applies():
        from delta_weight_sync.vllm import cpu

        cpu.install()


@functools.cache  # vLLM refuses to register a name twice
def _register_backend() -> None:
    """Add the backend to vLLM's registry, by name: its module is imported only by who chooses it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module = "delta_weight_sync.vllm.transfer"
    WeightTransferEngineFactory.register_engine(NAME, module, "DeltaWeightTransferEngine")


def _call(worker: object, **call: object) -> object:
    # `worker` imports numba, so it is imported late. When vLLM starts, it looks in all loaded modules for
    # kernels to patch, and crashes if it finds numba's kernels.
    if call.get("op") == "fits":
        from delta_weight_sync.vllm.adapters import fits

        return fits(worker, call["adapter"])  # type: ignore[arg-type]
    from delta_weight_sync.vllm.worker import call as answer

    return answer(worker, make=_made, **call)  # type: ignore[arg-type]


def _made(worker: Any) -> "DeltaWorker":
    from delta_weight_sync.vllm.worker import DeltaWorker

    if not worker.vllm_config.model_config.quantization:
        return DeltaWorker(worker)
    hooks.QUANTIZED.require()
    from delta_weight_sync.vllm.quantized import QuantizedWorker  # imports vLLM

    return QuantizedWorker(worker)
