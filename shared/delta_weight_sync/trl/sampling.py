"""Refuses sampling settings at which importance ratios would be wrong.

A ratio is right if two things hold: vLLM returns the log-probability with which it drew a token, and TRL
computes the log-probability of the same distribution.

- TRL divides its logits by the temperature. It knows no truncation (top_p, top_k, min_p) and no penalty.
- vLLM with `--logprobs-mode processed_logprobs` returns log-probabilities after everything that it did to the
  logits: penalties, temperature, and truncation, normalized over the tokens that are left. In its default
  mode, `raw_logprobs`, it returns those of the model's own distribution.

So a temperature is exact with processed log-probabilities, and 1.0 with either. Truncation and penalties
never are: the ratio would compare two different distributions. (With raw log-probabilities it would look
right, but the tokens were drawn from another distribution.)
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx

from delta_weight_sync.errors import ConfigError
from delta_weight_sync.replicas import read_status
from delta_weight_sync.vllm import PROCESSED

HEADER = "x-policy-logprobs"  # of a replica's answer: vLLM's `logprobs_mode`
RAW = "raw_logprobs"
NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values at which parameters have no effect, of those that TRL leaves to the server's default."""
_NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,)}
_NEUTRAL |= {name: (value,) for name, value in NEUTRAL.items()}
_LEAST = 0.01  # vLLM takes a lower temperature as 0.01, and 0 as greedy
_FIX = f"with --logprobs-mode {PROCESSED}"
_NO_COMMITS = 1 << 53  # no version is newer, so a status lists no commits


def require_exact(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if TRL cannot compute the distribution from which vLLM samples.

    Args:
        settings: Sampling parameters by TRL's names. A missing one has no effect; nor has None, except as
            the temperature, which TRL needs.
    """
    for name, allowed in _NEUTRAL.items():
        if (value := settings.get(name)) is not None and value not in allowed:
            raise ConfigError(
                f"{name} is {value}, but TRL computes the probabilities of the policy without {name}, so"
                f" importance ratios would be wrong: set {name}={allowed[0]}"
            )
    temperature = settings.get("temperature", 1.0)
    if temperature is None or not temperature >= _LEAST:
        raise ConfigError(
            f"temperature is {temperature}, at which vLLM does not sample from the policy's distribution:"
            f" set at least {_LEAST}"
        )


def problem(settings: Mapping[str, Any], url: str, report: Mapping[str, Any]) -> str:
    """Why a replica's log-probabilities would make ratios wrong, with the fix; "" if they would not.

    Args:
        settings: As for `require_exact`, which allowed them.
        url: The replica.
        report: What its status says: `logprobs_mode` and `sampling_defaults`; empty if it says nothing.
    """
    temperature = settings.get("temperature", 1.0)
    mode = report.get("logprobs_mode")
    if not mode and temperature != 1:
        return (
            f"temperature is {temperature}, but {url} does not say which log-probabilities it returns: start"
            f" that vLLM with this release's plugin and {_FIX}, or set temperature=1.0"
        )
    if mode == RAW and temperature != 1:
        return (
            f"temperature is {temperature}, but {url} returns the log-probabilities of temperature 1 ({RAW}),"
            f" so importance ratios would be wrong: start that vLLM {_FIX}, or set temperature=1.0"
        )
    if mode and mode not in (RAW, PROCESSED):
        return f"{url} returns {mode} in place of log-probabilities: start that vLLM {_FIX}"
    for name, value in (report.get("sampling_defaults") or {}).items():
        if name in NEUTRAL and value != NEUTRAL[name] and settings.get(name) is None:
            return (
                f"{url} samples with {name}={value}, from its model's generation_config.json, and TRL"
                " computes the probabilities without it: start that vLLM with --generation-config vllm"
            )
    return ""


def require_replica(settings: Mapping[str, Any], url: str, timeout_s: float) -> None:
    """Ask the vLLM at `url` how it makes log-probabilities. Raises `ConfigError` if ratios would be wrong.

    A Space knows this only once its vLLM runs, so this waits up to `timeout_s` for that if it matters.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        report = _report(url)
        starting = report.get("logprobs_mode") == ""
        if not (found := problem(settings, url, report)):
            return
        if not starting or time.monotonic() > deadline:
            raise ConfigError(found)
        time.sleep(1.0)


def _report(url: str) -> dict[str, Any]:
    """The status of a replica; empty if `url` is a vLLM without the plugin."""
    try:
        found = json.loads(read_status(url, _NO_COMMITS, proxies=False))  # as TRL's rollouts
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
