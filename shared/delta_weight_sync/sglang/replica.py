"""Refuses what cannot work before SGLang starts, then runs the follower in the scheduler's process.

The process that starts SGLang refuses what the library cannot do, with one sentence, before it starts another
process. The status is in `/server_info`, under `internal_states`, and alone at `/delta_weight_sync/status`.

The settings are those of `vllm.server.Settings`, but the ones that have no meaning here are refused.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI, HTTPException

from delta_weight_sync import compat
from delta_weight_sync.errors import CompatibilityError, ConfigError, DeltaWeightSyncError
from delta_weight_sync.reader import open_run
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.sglang import hooks
from delta_weight_sync.util import Guard
from delta_weight_sync.vllm import routes
from delta_weight_sync.vllm.disk import private_folder
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.server import PREFIX, Settings, check, settings_from

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_LOADER: Final = "sglang.srt.model_loader.loader"
_NAME: Final = "delta_weight_sync"
_reporting = Guard("the replica's status")
# SGLang's options (as SGLang has resolved them) that rule out commits unless they have one of these values.
_TAKEN: Final[Mapping[str, tuple[object, ...]]] = {
    # Each rank would have a part of the weights, and would have to commit in the same step.
    "tp_size": (1,),
    "pp_size": (1,),
    "dp_size": (1,),
    "nnodes": (1,),
    # Other processes would serve HTTP, without the status.
    "tokenizer_worker_num": (1,),
    "enable_pdmux": (False,),
    # The weights that SGLang computes with are not those of the run.
    "quantization": (None,),
    "torchao_config": (None, ""),
    "load_format": ("auto", "safetensors"),
    "enable_lora": (None, False),
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    # Weights are elsewhere, or move.
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1,),
    "ple_offload_embedding": (None, False),
    "enable_memory_saver": (False,),
    "kt_weight_path": (None,),
    "enable_eplb": (False,),
    "elastic_ep_backend": (None,),
    "enable_paged_experts": (None, False),
    "weight_cache_mode": ("off",),
    "startup_weight_load_mode": ("serial",),
    # Keys and values of old weights are kept where no `extra_key` tells them apart.
    "radix_cache_backend": (None,),
    "enable_hierarchical_cache": (False,),
    "hicache_storage_backend": (None,),
    "enable_unified_cache_external_linker": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_streaming_session": (False,),
    "enable_session_radix_cache": (False,),
    "disaggregation_mode": ("null",),
}


def hook() -> None:
    """Register the hooks that this process of SGLang needs. SGLang applies them next."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", _checked, HookType.AFTER)
    if _SCHEDULER in sys.modules:  # else this process neither has a scheduler nor starts one
        for target, (hook, kind) in _HOOKS.items():
            HookRegistry.register(target, hook, HookType(kind))


def refusal(options: Mapping[str, Any]) -> str:
    """Why SGLang cannot take commits with these options; "" if it can. An option that this release does not
    have is taken: a release that was not tested is warned about."""
    for name, taken in _TAKEN.items():
        value = options.get(name, taken[0])
        if value not in taken:
            option = f"--{name.replace('_', '-')}"
            return f"with {option} {value}, this SGLang cannot take commits: start it without"
    return ""


def _settings() -> Settings:
    settings = settings_from(os.environ)
    for name, why in (
        ("KEY", "SGLang has no routes for it: use --api-key"),
        ("PAUSE", "SGLang commits between two steps: unset it"),
    ):
        if getattr(settings, name.lower()):
            raise ConfigError(f"{PREFIX}{name}: {why}")
    return settings


# In the process that starts SGLang.


def _checked(_: None, arguments: Any) -> None:
    """Refuse what cannot work, after SGLang has checked its own options."""
    try:
        check(_settings())
        compat.require(hooks.FEATURES)
        if reason := refusal(arguments.resolved_dict()):
            raise ConfigError(reason)
    except DeltaWeightSyncError as error:  # one sentence, before a process is started
        sys.exit(f"{_NAME}: {error}")
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None:  # this is no `sglang.Engine`
        _add_route(server.app, server.get_global_state)


def _add_route(app: FastAPI, state: Any) -> None:
    """Add the status to SGLang's HTTP server, as `vllm.server` does to vLLM's."""

    @app.get("/delta_weight_sync/status")
    async def status(after: int = -1) -> dict[str, Any]:
        """Return version, digest and state, and the commits of versions after `after`."""
        running = state()
        if running is None:
            raise HTTPException(503, "SGLang is starting: repeat the request")
        (found,) = await running.tokenizer_manager.get_internal_state()
        if _NAME not in found:
            raise HTTPException(503, "the replica could not report: SGLang's log says why")
        report: dict[str, Any] = found[_NAME]
        return {**report, "commits": [each for each in report["commits"] if each["version"] > after]}


# In the scheduler's process.


class Replica:
    """An engine and its follower, in the process of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler`: SGLang's scheduler, with a loaded model."""
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.runtime_context import get_serving

        from delta_weight_sync.sglang.engine import SglangEngine  # imports numba

        for target in _HOOKS:
            if target not in HookRegistry._patched:
                raise CompatibilityError(f"SGLang did not apply the hook on {target}: its log says why")
        settings = _settings()
        self._scratch = Scratch()
        own = private_folder(settings.folder, f"{PREFIX}FOLDER") if settings.folder else None
        self.engine = SglangEngine(scheduler, str(get_serving().weight_version))
        self.follower = Follower(
            open_run(settings.run, public_key=settings.public_key or None),
            self.engine,
            name=settings.name,
            folder=own or self._scratch.path,
            poll_s=settings.poll_s,
        )


def _start(scheduler: Any) -> None:
    """Start the follower, before the scheduler looks for its first request."""
    # By default, a Python thread runs for 5 ms while others wait: the scheduler would wait for staging.
    sys.setswitchinterval(0.0005)
    scheduler.delta_weight_sync = Replica(scheduler)
    scheduler.delta_weight_sync.follower.start()


def _before_requests(scheduler: Any, _: Any) -> None:
    scheduler.delta_weight_sync.engine.run_calls()


def _ends_step(plain: Any, scheduler: Any, batch: Any, last_batch: Any) -> bool:
    return bool(scheduler.delta_weight_sync.engine.ends_step(batch) or plain(scheduler, batch, last_batch))


def _before_step(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    scheduler.delta_weight_sync.engine.run_calls(batch)


def _keyed(request: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    return scheduler.delta_weight_sync.engine.keyed(request)


def _with_status(answer: Any, scheduler: Any, _: Any) -> Any:
    with _reporting:
        answer.internal_state[_NAME] = scheduler.delta_weight_sync.follower.report(-1).model_dump(mode="json")
    return answer


# SGLang's functions in the scheduler's process -> our hook, and how SGLang calls it.
_HOOKS: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    f"{_SCHEDULER}.Scheduler.run_event_loop": (_start, "before"),
    f"{_SCHEDULER}.Scheduler.process_input_requests": (_before_requests, "before"),
    f"{_SCHEDULER}.Scheduler.is_disable_overlap_for_batch": (_ends_step, "around"),
    f"{_SCHEDULER}.Scheduler.run_batch": (_before_step, "before"),
    f"{_SCHEDULER}.Scheduler._create_generation_req": (_keyed, "after"),
    f"{_SCHEDULER}.Scheduler.get_internal_state": (_with_status, "after"),
    f"{_LOADER}._initialize_model": (routes.watch_build, "around"),
    f"{_LOADER}.DefaultModelLoader.postprocess_weights": (routes.watch_finish, "around"),
}
