"""Sampling settings at which ratios would be wrong are refused, with the fix; all others pass."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from delta_weight_sync import ConfigError
from delta_weight_sync.trl import patches, sampling
from tests.support.http_server import answering

URL = "http://replica:8000"
PROCESSED = {"logprobs_mode": "processed_logprobs", "sampling_defaults": {}}
RAW = PROCESSED | {"logprobs_mode": "raw_logprobs"}
MODE = "with --logprobs-mode processed_logprobs"
NO_DEFAULTS = "with --generation-config vllm"
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


@pytest.mark.parametrize("settings", [{}, NEUTRAL, {"top_k": -1, "min_p": 0.0}, {"temperature": 1.3}])
def test_what_trl_computes_is_allowed(settings):
    sampling.require_exact(settings)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"top_p": 0.9}, "set top_p=1.0"),
        ({"top_k": 20}, "set top_k=0"),
        ({"min_p": 0.05}, "set min_p=0.0"),
        ({"repetition_penalty": 1.1}, "set repetition_penalty=1.0"),
        ({"presence_penalty": 0.5}, "set presence_penalty=0.0"),
        ({"frequency_penalty": -0.5}, "set frequency_penalty=0.0"),
        ({"temperature": None}, "set at least 0.01"),  # TRL would divide by it
        ({"temperature": 0.0}, "set at least 0.01"),
        ({"temperature": 0.001}, "set at least 0.01"),  # vLLM would sample at 0.01
    ],
)
def test_what_trl_does_not_compute_is_refused(settings, fix):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name} is .*: {fix}"):
        sampling.require_exact(settings)


@pytest.mark.parametrize(
    ("temperature", "report", "fix"),
    [
        (0.7, PROCESSED, ""),
        (1.0, RAW, ""),
        (1.0, {}, ""),  # a replica of an older release, or a vLLM without the plugin
        (0.7, RAW, f"start that vLLM {MODE}, or set temperature=1.0"),
        (0.7, {}, f"start that vLLM with this release's plugin and {MODE}, or set temperature=1.0"),
        (1.0, RAW | {"logprobs_mode": "raw_logits"}, f"start that vLLM {MODE}"),
        (1.0, PROCESSED | {"sampling_defaults": {"min_p": 0.1}}, f"start that vLLM {NO_DEFAULTS}"),
        (1.0, PROCESSED | {"sampling_defaults": {"temperature": 0.6}}, ""),  # TRL sends its own
    ],
)
def test_a_replica_whose_logprobs_are_of_another_distribution_is_refused(
    temperature: float, report: dict[str, Any], fix: str
):
    found = sampling.problem({"temperature": temperature, "min_p": None}, URL, report)
    assert (URL in found, found.split(": ")[-1]) == (bool(fix), fix)
    assert sampling.problem({"temperature": temperature, "min_p": 0.0}, URL, report) == (
        "" if "min_p" in found else found
    )


def test_trls_worker_asks_its_vllm_before_the_first_rollout(monkeypatch):
    """Whether the vLLM has our plugin, none of it, or is a Space whose vLLM still starts."""
    started = []
    monkeypatch.setattr(patches, "_START", started.append)
    monkeypatch.setattr(sampling.time, "sleep", lambda _: None)
    answers: dict[str, list[dict[str, Any]]] = {}

    def answer(request: Any) -> tuple[int, dict[str, str], bytes]:
        path = request.path.partition("?")[0]
        if not (left := answers.get(path)):
            return (200 if path == "/health" else 404), {}, b"{}"
        return 200, {}, json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode()

    def start(temperature: float, url: str) -> None:
        settings = {"vllm_server_url": url, "temperature": temperature}
        patches.start(SimpleNamespace(settings=settings))

    with answering(answer) as url:
        start(1.0, url)
        with pytest.raises(ConfigError, match="does not say which log-probabilities"):
            start(0.7, url)
        answers["/delta_weight_sync/status"] = [RAW]
        with pytest.raises(ConfigError, match=f"{url} returns the log-probabilities of temperature 1"):
            start(0.7, url)
        answers["/delta_weight_sync/status"] = [PROCESSED]
        start(0.7, url)
        answers.clear()
        answers["/status"] = [PROCESSED | {"logprobs_mode": ""}, PROCESSED]
        start(0.7, url)
    assert len(started) == 3
