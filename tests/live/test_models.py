"""Models whose parameters have other names, stacks or dtypes than their checkpoint, served by a real vLLM.

They are trained with AdamW for ten steps. The replica that took the deltas answers as a fresh load does, and
`from_pretrained` of the followed version has the trainer's bits.
"""

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher, follow
from tests.live.replica import greedy, served
from tests.support import tiny_policy
from tests.support.models import build, loads_as, save, train

pytestmark = [pytest.mark.live, pytest.mark.long]  # vLLM starts twice for each model

STEPS = 10
PROMPTS = [[1, 5, 9, 100, 120, 33], [7] * 12, [50, 40, 30, 20, 10, 5, 4, 3]]
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "deepseek_v3": {"attention-backend": "CPU_MLA"},  # other backends rearrange its weights
    "qwen2_5_vl": {"language-model-only": True},
}
# vLLM's vision models import torchvision, which the CPU build comes without. No picture is looked at here.
NO_TORCHVISION = """
import sys
from unittest.mock import MagicMock
for part in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io"):
    sys.modules[f"torchvision.{part}"] = MagicMock()
__version__ = "0.0"
"""


def trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_trained_model_answers_as_a_fresh_load_and_is_followed_bit_for_bit(name, tmp_path, monkeypatch):
    base = save(model := build(name), tmp_path / "base")
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    tiny_policy.build(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").glob("*token*"):
        shutil.copy(file, base)
    (tmp_path / "stub" / "torchvision").mkdir(parents=True)
    (tmp_path / "stub" / "torchvision" / "__init__.py").write_text(NO_TORCHVISION)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stub'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for folder in ("replica", "fresh"):
        (tmp_path / folder).mkdir()
    options = {"max-model-len": 128, **OPTIONS[name]}
    if name == "qwen2_5_vl":
        model.model.visual.requires_grad_(False)
    with Publisher(url, base) as publisher, served(base, url, tmp_path / "replica", **options) as replica:
        publisher.publish(trained(model) if name == "qwen2_5_vl" else model)
        replica.wait_for(0)
        before = greedy(replica.url, PROMPTS)
        for _ in range(STEPS):
            train(model, 1)
            balance(model)
            publisher.publish(trained(model) if name == "qwen2_5_vl" else model)
        newest = publisher.flush()
        status = replica.wait_for(newest.version)
        assert status["digest"] == newest.digest
        after = greedy(replica.url, PROMPTS)
    (version,) = follow(url, into=tmp_path / "followed", once=True)
    assert loads_as(model, version.path) == []
    with served(version.path, url, tmp_path / "fresh", **options) as fresh:
        assert greedy(fresh.url, PROMPTS) == after != before


def balance(model: torch.nn.Module) -> None:
    """Move the biases of routers, float32 buffers, as load balancing without an auxiliary loss does."""
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            bias += 0.001 * torch.sign(torch.randn(bias.shape))


def test_a_vllm_that_was_started_with_another_config_of_the_same_shapes_is_refused(tmp_path):
    """Such as one rotary base for another: it would take the weights, and generate other tokens."""
    tiny_policy.build(tmp_path / "base", tie=True, seed=0)
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 50
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    with Publisher(url, tmp_path / "base") as publisher:
        publisher.publish(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    (tmp_path / "replica").mkdir()
    with served(tmp_path / "other", url, tmp_path / "replica") as replica:
        status = replica.wait_until(lambda status: status["state"] == "refused", "refusal")
        assert status["error"].startswith("rope_parameters.rope_theta is ")
        assert status["version"] is None
