"""What the library needs of SGLang beyond its public interface, in one place for each new release of SGLang.

Each function looks for the code of one feature. Its docstring says what the library does with the code, and
which change of SGLang would end that. SGLang is imported only when a feature is asked for. All patches go
through SGLang's own `HookRegistry`, in the processes that `replica` names.
"""

from delta_weight_sync.compat import Feature, Package, Probe

SGLANG = Package(("sglang",), tested=("0.5.23",), extra="sglang")
_SCHEDULER = "sglang.srt.managers.scheduler"
_LOADER = "sglang.srt.model_loader.loader"


def _launch(probe: Probe) -> None:
    """`replica` refuses settings before a process is started, and checks that SGLang applied its hooks. (A
    hook that may refuse a configuration would end the first, and hooks that fail loudly the second.)"""
    registry = "sglang.srt.plugins.hook_registry"
    probe.accepts(registry, "HookRegistry.register", "target", "hook", "hook_type")
    probe.attributes(registry, "HookRegistry", "_patched")
    arguments = "sglang.srt.server_args"
    probe.exactly(arguments, "ServerArgs.check_server_args", "self")
    probe.exactly(arguments, "ServerArgs.resolved_dict", "self")


def _steps(probe: Probe) -> None:
    """`engine` commits when no step is under way. (A public call "run this between two steps" that answers
    would end that.)"""
    probe.exactly(_SCHEDULER, "Scheduler.process_input_requests", "self", "recv_reqs")
    probe.calls(_SCHEDULER, "Scheduler.event_loop_normal", "ingest_requests")
    probe.calls(_SCHEDULER, "Scheduler.ingest_requests", "process_input_requests")
    loop = "Scheduler.event_loop_overlap"
    for method in ("ingest_requests", "is_disable_overlap_for_batch", "run_batch", "result_queue"):
        probe.calls(_SCHEDULER, loop, method)
    probe.exactly(_SCHEDULER, "Scheduler.is_disable_overlap_for_batch", "self", "batch", "last_batch")
    probe.accepts(_SCHEDULER, "Scheduler.run_batch", "self", "batch")
    probe.exactly(_SCHEDULER, "Scheduler.run_event_loop", "self")
    probe.attributes(_SCHEDULER, "Scheduler", "tp_worker", "model_config")


def _labels(probe: Probe) -> None:
    """`engine` labels tokens as SGLang's own weight updates do. (A public name would end that.)"""
    probe.exactly(_SCHEDULER, "Scheduler.record_weight_version_change", "self", "new_version")
    probe.find("sglang.srt.runtime_context", "get_serving")


def _prefixes(probe: Probe) -> None:
    """`engine` gives the requests of each version their own `extra_key`, by which SGLang's cache tells
    prefixes apart. (A cache that drops prefixes while requests run would end that.)"""
    probe.accepts(_SCHEDULER, "Scheduler._create_generation_req", "self", "recv_req")
    probe.attributes(_SCHEDULER, "Scheduler", "waiting_queue", "grammar_manager", "tree_cache")
    probe.find("sglang.srt.managers.schedule_batch", "ReqKvInfo.holds_kv")
    probe.attributes("sglang.srt.managers.schedule_batch", "Req", "extra_key", "kv", "retraction_count")


def _derived(probe: Probe) -> None:
    """`routes` records what a model holds before loading, and what changes after loading. (A model that names
    what it derives from its weights would end that.)"""
    probe.accepts(_LOADER, "_initialize_model", "model_config", "load_config")
    probe.exactly(_LOADER, "DefaultModelLoader.postprocess_weights", "model", "target_device")


def _status(probe: Probe) -> None:
    """`replica` adds the replica's status to what `/server_info` shows, and to the HTTP server a route that
    shows only the status. (Routes of plugins would end that.)"""
    probe.exactly(_SCHEDULER, "Scheduler.get_internal_state", "self", "recv_req")
    probe.attributes("sglang.srt.managers.io_struct", "GetInternalStateReqOutput", "internal_state")
    probe.find("sglang.srt.entrypoints.http_server", "app")
    probe.find("sglang.srt.entrypoints.http_server", "get_global_state")


LAUNCH = Feature(SGLANG, "a start that refuses wrong settings", _launch)
STEPS = Feature(SGLANG, "commits between two steps", _steps)
LABELS = Feature(SGLANG, "the version of each token", _labels)
PREFIXES = Feature(SGLANG, "prefixes of one version only", _prefixes)
DERIVED = Feature(SGLANG, "models that keep tensors besides their parameters", _derived)
STATUS = Feature(SGLANG, "the replica's status", _status)
FEATURES: tuple[Feature, ...] = (LAUNCH, STEPS, LABELS, PREFIXES, DERIVED, STATUS)
