"""The part of the library that runs inside vLLM and brings versions from the bucket into live parameters."""

import os
from typing import Any

from delta_weight_sync import compat
from delta_weight_sync.vllm import hooks

BACKEND = "delta_weight_sync"  # name of the plugin, and of the backend for vLLM's weight transfer API
METHOD = "delta_weight_sync"  # name of the method that the plugin adds to every vLLM worker: see `worker`
PAUSE = "DELTA_WEIGHT_SYNC_PAUSE"
# The name under which the Space serves the policy, and under which `trainer` asks for it. It is stated here,
# because apps do not import each other.
MODEL_NAME = "policy"
# The `--logprobs-mode` in which vLLM returns log-probabilities of the distribution from which it samples. No
# official extension point lets a plugin choose it: vLLM makes its configuration from the command line alone.
PROCESSED = "processed_logprobs"
# Why no replica, of weights or of adapters, takes this option.
NO_SLEEP = "--enable-sleep-mode takes the weights away while a stage may read them; start vLLM without it"


def commits_between_steps() -> bool:
    """Whether this vLLM takes commits between two steps. Otherwise the follower pauses vLLM to commit. Raises
    `CompatibilityError` if this vLLM can do neither."""
    if hooks.IN_STEP.works() and not compat.is_set(PAUSE):
        return True
    hooks.PAUSED.require()
    return False


def is_named() -> bool:
    """Whether VLLM_PLUGINS names the plugin. Otherwise the plugin changes nothing of vLLM."""
    return BACKEND in os.environ.get("VLLM_PLUGINS", "").split(",")


def takes_images(model_config: Any) -> bool:
    """Whether a model takes images or other media; in vLLM 0.29 and 0.30, whether its class can take them."""
    if hasattr(model_config, "supports_multimodal_inputs"):
        return bool(model_config.supports_multimodal_inputs)
    return bool(model_config.is_multimodal_model)
