"""vLLM with speculative decoding answers as vLLM without, through commits; drafts of the run follow it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import hooks
from tests.live.replica import greedy, served
from tests.live.run import training
from tests.live.test_engine import ENVIRONMENT, moved
from tests.support import tiny_policy as tiny

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not hooks.DRAFTS.works(), reason="this vLLM does not show its draft"),
]

COMMITS = 50
MTP = "model.mtp_layers.0"
ELSEWHERE = "it is loaded from another checkpoint than the model"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny.build(folder / "base", tie=True, seed=0)
    move(folder)
    shutil.copytree(folder / "base", folder / "elsewhere")
    return folder


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    """A MiMo, which is a Qwen2 with a layer for multi-token prediction in its checkpoint."""
    folder = tmp_path_factory.mktemp("mtp")
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder / "base")
    written = folder / "base/config.json"
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    written.write_text(json.dumps(json.loads(written.read_text()) | more))
    state = load_file(folder / "base" / WEIGHTS)
    block = {
        name.replace("model.layers.0", MTP): bits.clone() for name, bits in state.items() if ".0." in name
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    block |= {f"{MTP}.{norm}.weight": torch.ones(64).bfloat16() for norm in norms}
    block[f"{MTP}.input_proj.weight"] = 0.1 * torch.randn(64, 128).bfloat16()
    save_file(state | block, folder / "base" / WEIGHTS, metadata={"format": "pt"})
    move(folder)
    return folder


def move(folder: Path) -> None:
    """Write a checkpoint that is `COMMITS` deltas after `base`, and the deltas."""
    rng = np.random.default_rng(0)
    old = dict(read_bits(folder / "base"))
    versions = []
    for number in range(COMMITS):
        new = {name: moved(bits, rng) for name, bits in old.items()}
        patches = [codec.diff(name, old[name], new[name]) for name in old]
        (folder / f"delta-{number}").write_bytes(
            codec.encode(patches, old.__getitem__, base=number, version=number + 1)
        )
        versions.append((f"delta-{number}", to_hex(state_digest(new))))
        old = new
    (folder / "versions.json").write_text(json.dumps(versions))
    shutil.copytree(folder / "base", folder / "next", ignore=shutil.ignore_patterns("*.safetensors"))
    write_bits({name: bits.shape for name, bits in old.items()}, old.__getitem__, folder / "next" / WEIGHTS)


def speculate(folder: Path, **config: Any) -> dict[str, Any]:
    words = ["-m", "tests.live.speculation", str(folder), json.dumps(config)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, *words], env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=log
        )
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: found[name]["acceptance"] for name in ("before", "after", "fresh")})
    assert found["learned"]["digest"] == to_hex(state_digest(dict(read_bits(folder / "base"))))
    assert found["beside"] == 200, "the running request went on through all commits"
    assert found["after"]["tokens"] == found["plain"] == found["fresh"]["tokens"]
    assert found["after"]["tokens"] != found["before"]["tokens"]
    return found


@pytest.mark.long
def test_n_grams(policy):
    found = speculate(
        policy, method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )
    assert found["learned"]["drafts"] == {"method": "ngram", "kept": ""}


@pytest.mark.long
def test_a_draft_from_the_models_checkpoint_follows(policy):
    found = speculate(policy, method="draft_model", model=str(policy / "base"), num_speculative_tokens=3)
    assert found["learned"]["drafts"] == {"method": "draft_model", "kept": ""}
    assert found["draft"] == found["fresh"]["draft"]
    assert found["before"]["acceptance"] == found["after"]["acceptance"] == found["fresh"]["acceptance"]


@pytest.mark.long
def test_a_draft_from_elsewhere_keeps_its_weights(policy):
    found = speculate(policy, method="draft_model", model=str(policy / "elsewhere"), num_speculative_tokens=3)
    assert found["learned"]["drafts"] == {"method": "draft_model", "kept": ELSEWHERE}
    assert found["draft"] != found["fresh"]["draft"]
    assert found["after"]["acceptance"] < found["before"]["acceptance"]


@pytest.mark.long
def test_a_replica_says_that_its_draft_keeps_its_weights(tmp_path):
    with training(tmp_path) as trainer:
        shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
        draft = {"method": "draft_model", "model": str(tmp_path / "elsewhere"), "num_speculative_tokens": 3}
        (tmp_path / "replica").mkdir()
        run = f"{trainer.bucket.url}#live"
        options = {"speculative-config": json.dumps(draft), "max-model-len": 512}
        with served(tmp_path / "base", run, tmp_path / "replica", **options) as replica:
            replica.wait_for(0)
            greedy(replica.url)
            trainer.step()
            replica.wait_for(trainer.publish())
            status = replica.status()
    drafts = status["drafts"]
    assert (drafts["method"], drafts["kept"]) == ("draft_model", ELSEWHERE)
    assert 0 < drafts["accepted"] <= drafts["drafted"]
    sentence = "keeps the weights that it started with, so vLLM will accept fewer of its tokens"
    assert sentence in status["notice"]
    log = (tmp_path / "replica/vllm.log").read_text()
    assert sentence in log


@pytest.mark.long
def test_a_layer_for_multi_token_prediction_follows(mtp):
    found = speculate(mtp, method="mtp", num_speculative_tokens=1)
    assert found["learned"]["drafts"] == {"method": "mtp", "kept": ""}
    assert found["draft"] == found["fresh"]["draft"]
    assert found["after"]["acceptance"] == found["fresh"]["acceptance"]
