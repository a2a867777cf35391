"""At each sampling setting, ratios at staleness 0 are 1, or the setting is refused."""

import random
from typing import Any

import httpx
import pytest
import torch
from trl.experimental.async_grpo import async_rollout_worker

from delta_weight_sync import ConfigError
from delta_weight_sync.trl import patches, sampling
from tests.live.replica import HEADERS, Replica
from tests.live.run import Trainer, update
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.live
PROMPTS = [[random.Random(i).randrange(5, 250) for _ in range(12)] for i in range(16)]
TOKENS = 32


def sampled(replica: Replica, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Completions that are asked for as TRL asks."""
    asked = {"model": "policy", "prompt": PROMPTS, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    asked |= {"return_token_ids": True, "seed": 7, "top_p": 1.0, "top_k": 0, **settings}
    answer = httpx.post(f"{replica.url}/v1/completions", json=asked, headers=HEADERS, timeout=PATIENCE_S)
    assert answer.raise_for_status().headers[sampling.HEADER] == "processed_logprobs"
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def ratios(trainer: Trainer, choices: list[dict[str, Any]], temperature: float) -> torch.Tensor:
    """What TRL computes: it divides its logits by the temperature, and does nothing else to them."""
    output = torch.tensor([choice["token_ids"] for choice in choices])
    with torch.inference_mode():
        logits = trainer.model(input_ids=torch.cat([torch.tensor(PROMPTS), output], 1)).logits
    logprobs = (logits[:, len(PROMPTS[0]) - 1 : -1].float() / temperature).log_softmax(-1)
    served = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
    return (logprobs.gather(2, output[:, :, None])[..., 0] - served).exp()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_a_temperature_gives_ratios_of_one(trainer: Trainer, replica: Replica, temperature: float):
    update(trainer, replica)
    sampling.require_exact({"temperature": temperature})
    report = replica.status()
    assert report["logprobs_mode"] == "processed_logprobs"
    assert sampling.problem({"temperature": temperature}, replica.url, report) == ""
    found = ratios(trainer, sampled(replica, {"temperature": temperature}), temperature)
    assert 0.99 < found.mean() < 1.01
    assert ((found < 0.8) | (found > 1.2)).float().mean() < 0.01, "TRL would clip hardly a token"


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 20}])
def test_what_trl_does_not_compute_is_refused_because_its_ratios_are_wrong(
    trainer: Trainer, replica: Replica, settings: dict[str, float], monkeypatch
):
    found = ratios(trainer, sampled(replica, settings), 1.0)
    assert not 0.99 < found.mean() < 1.01
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)
    patches.install()
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"^{name} is {value}, .* would be wrong: set {name}="):
        async_rollout_worker.AsyncRolloutWorker(**settings)
