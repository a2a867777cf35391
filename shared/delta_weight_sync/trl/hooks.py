"""What the library needs of TRL beyond its public interface, in one place for each new release of TRL.

Each function looks for the code of one feature. Its docstring says what the library does with the code, and
which change in upstream/ would end that. TRL is imported only when a feature is asked for.
"""

import importlib.util

from delta_weight_sync.compat import Feature, Package, Probe

TRL = Package(("trl",), tested=("1.16",), extra="trl")
_TRAINER = "trl.experimental.async_grpo.async_grpo_trainer"
_ROLLOUTS = "trl.experimental.async_grpo.async_rollout_worker"
_PACKING = "trl.experimental.async_grpo.packing"
# Where TRL 1.18 has the trainer, according to its release notes. It takes no `weight_transfer`.
_MOVED_TRAINER = "trl.trainer.async_grpo_trainer"


def _transfer(probe: Probe) -> None:
    """`BucketWeightTransfer` is passed to TRL's trainer, and receives the weights. Where the trainer has
    moved, the new place is looked at first, so that the message names what is really missing."""
    if _exists(_MOVED_TRAINER) and not _exists(_TRAINER):
        probe.accepts(_MOVED_TRAINER, "AsyncGRPOTrainer.__init__", "weight_transfer")
        probe.find(_TRAINER, "AsyncGRPOTrainer")
        return
    probe.accepts(_TRAINER, "AsyncGRPOTrainer.__init__", "weight_transfer")
    probe.attributes(_TRAINER, "AsyncGRPOTrainer", "weight_transfer")
    probe.exactly(_TRAINER, "WeightTransferProtocol.send_weights", "self", "iterator")


def _every_rank(probe: Probe) -> None:
    """`trainer` overrides `_streaming_iter`, and counts syncs. (trl/0001 would hand the weights of every rank
    to a weight transfer.)"""
    probe.exactly(_TRAINER, "AsyncGRPOTrainer._streaming_iter", "self")
    probe.calls(_TRAINER, "AsyncGRPOTrainer._sync_weight_merged", "_streaming_iter")
    probe.attributes(_TRAINER, "AsyncGRPOTrainer", "model_version")


def _adapters(probe: Probe) -> None:
    """`patches` keeps TRL from merging adapters into the base for a sync, and yields merged copies."""
    probe.exactly(_TRAINER, "AsyncGRPOTrainer._streaming_iter", "self")
    probe.exactly(_TRAINER, "AsyncGRPOTrainer._sync_weight_merged", "self", "t0")
    for method in ("_streaming_iter", "merge_adapter", "unmerge_adapter"):
        probe.calls(_TRAINER, "AsyncGRPOTrainer._sync_weight_merged", method)


def _attention(probe: Probe) -> None:
    """`cpu` replaces the FlashAttention kernel from the Hub, and the table of peak throughputs, which has no
    CPU. (trl/0005 and trl/0003 would end the two.)"""
    probe.exactly(_PACKING, "_flash_attn")
    probe.find(_TRAINER, "get_peak_flops_per_device")


def _without_vllm(probe: Probe) -> None:
    """`patches` passes TRL's check, as its rollouts use vLLM over HTTP only. (trl/0004 would drop it.)"""
    probe.find(_ROLLOUTS, "is_vllm_available")


def _child(probe: Probe) -> None:
    """`patches` ends TRL's rollout process with the trainer, waits for vLLM, and names causes of failures."""
    probe.find(_ROLLOUTS, "_child_main")
    for method in ("start", "check_health", "stop"):
        probe.find(_ROLLOUTS, f"AsyncRolloutWorker.{method}")


def _exact(probe: Probe) -> None:
    """The app's `trainer.exact` packs samples as TRL does, so that the second model computes the same."""
    for method in ("add", "fits", "pack"):
        probe.find(_PACKING, f"TreeRow.{method}")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


TRANSFER = Feature(TRL, "`BucketWeightTransfer`", _transfer)
EVERY_RANK = Feature(
    TRL,
    "`BucketGRPOTrainer`: sharded and frozen weights, resuming",
    _every_rank,
    without="only `BucketWeightTransfer` works",
    since="1.14",
    upstream="trl/0001",
)
ADAPTERS = Feature(
    TRL,
    "`peft_config`: adapters that are published merged, while the base stays as it is",
    _adapters,
    without="TRL merges adapters into the base itself at each sync, and rounds the base's weights",
    since="1.16",
)
ATTENTION = Feature(
    TRL,
    "training on a CPU, in float32, or without the package `kernels`",
    _attention,
    without="TRL needs `kernels` and a GPU with FlashAttention 3",
    since="1.16",
    upstream="trl/0003, trl/0005",
)
WITHOUT_VLLM = Feature(
    TRL,
    "rollouts without vLLM in the trainer's environment",
    _without_vllm,
    without="the trainer's environment needs vLLM too",
    upstream="trl/0004",
)
CHILD = Feature(
    TRL,
    "a rollout process that ends with the trainer",
    _child,
    without="the rollout process runs on if the trainer is killed, and its failures do not name the cause",
)
EXACT = Feature(
    TRL,
    "`--exact_old_policy`",
    _exact,
    without="the option is refused",
    since="1.16",
)
FEATURES: tuple[Feature, ...] = (TRANSFER, EVERY_RANK, ADAPTERS, ATTENTION, WITHOUT_VLLM, CHILD, EXACT)
