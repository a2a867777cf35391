"""The `vllm.general_plugins` entry point: makes our weight-transfer backend known to stock vLLM.

vLLM loads every plugin that is installed, unless VLLM_PLUGINS names those to load. Ours patches vLLM, so it
does nothing for a vLLM that does not name it.
"""

import multiprocessing
import os

BACKEND = "delta_weight_sync"
TESTED = ("0.32",)


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    Raises `RuntimeError` if it was asked for in a vLLM that it was not tested with.
    """
    if BACKEND not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    import vllm

    if not vllm.__version__.startswith(TESTED):
        raise RuntimeError(
            f"delta weight sync was tested with vLLM {', '.join(TESTED)}, found {vllm.__version__}; "
            "install a tested version"
        )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "delta_weight_sync.vllm.engine", "DeltaEngine")
    from delta_weight_sync.vllm import lifeline, step_commit

    parent = multiprocessing.parent_process()
    if parent and parent.pid:  # of vLLM's engine and workers; who starts vLLM decides for the server
        lifeline.end_with_parent(parent.pid)
    step_commit.install()
    if current_platform.is_cpu():
        from delta_weight_sync.vllm import cpu_backend

        cpu_backend.install()
