"""The `vllm.general_plugins` entry point: makes stock vLLM able to take commits of a run.

vLLM loads every plugin that is installed, unless VLLM_PLUGINS names those to load. Ours patches vLLM, so it
does nothing for a vLLM that does not name it.
"""

import multiprocessing
import os

NAME = "delta_weight_sync"
TESTED = ("0.32",)


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    Raises `RuntimeError` if it was asked for in a vLLM that it was not tested with.
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    import vllm

    if not vllm.__version__.startswith(TESTED):
        raise RuntimeError(
            f"delta weight sync was tested with vLLM {', '.join(TESTED)}, found {vllm.__version__}; "
            "install a tested version"
        )
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import WorkerBase

    from delta_weight_sync.vllm import METHOD, derived, lifeline, step_commit

    parent = multiprocessing.parent_process()
    if parent and parent.pid:  # of vLLM's engine and workers; who starts vLLM decides for the server
        lifeline.end_with_parent(parent.pid)
    setattr(WorkerBase, METHOD, _call)
    step_commit.install()
    derived.install()
    if current_platform.is_cpu():
        from delta_weight_sync.vllm import cpu_backend

        cpu_backend.install()


def _call(worker: object, **call: object) -> object:
    # Not before the worker runs: at its start vLLM replaces kernels in all modules, and stumbles over numba.
    from delta_weight_sync.vllm.worker import call as answer

    return answer(worker, **call)  # type: ignore[arg-type]
