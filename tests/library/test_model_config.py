"""An engine that was started with a config that computes otherwise is refused, and no other."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from delta_weight_sync.errors import EngineError, RouteError
from delta_weight_sync.model_config import difference, require_same
from delta_weight_sync.vllm.engine import Engine


def config(kind: str = "llama", **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, "hidden_size": 64, **fields}


YARN = {"rope_type": "yarn", "factor": 4.0}
PARTS = {"rms_norm_eps": 1e-5, "sliding_window": 512}


@pytest.mark.parametrize(
    ("started", "published", "field"),
    [
        (config(), config(rope_theta=5e5), "rope_parameters.rope_theta is 10000.0, but 500000.0 in the run"),
        (config(), config(rms_norm_eps=1e-5), "rms_norm_eps is 1e-06, but 1e-05 in the run"),
        (config("mistral"), config("mistral", sliding_window=None), "sliding_window is 4096, but None"),
        (config(), config(rope_scaling=YARN | {"rope_theta": 1e4}), "rope_parameters"),
        (
            {"model_type": "gemma3"},
            {"model_type": "gemma3", "text_config": PARTS},
            "text_config.rms_norm_eps",
        ),
        (config("gemma2"), config("gemma2", final_logit_softcapping=None), "final_logit_softcapping"),
        (config(), config("mistral"), "model_type is llama, but mistral in the run"),
        (config("my_own", scale=1.0), config("my_own", scale=2.0), "scale is 1.0, but 2.0 in the run"),
        (
            config(rope_scaling=YARN),
            config(rope_scaling=YARN, max_position_embeddings=8192),
            "max_position_embeddings is 2048, but 8192",
        ),
    ],
)
def test_a_field_that_counts_is_named(started, published, field):
    assert difference(started, published).startswith(field)
    assert difference(published, started)


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": [2, 3], "pad_token_id": 0},  # as trainers set them
        {"torch_dtype": "float16", "use_cache": False, "attention_dropout": 0.1},
        {"transformers_version": "4.40.0", "architectures": ["LlamaForCausalLM"], "_name_or_path": "me/it"},
        {"unsloth_fixed": True},  # a field that no class of transformers knows
        {"max_position_embeddings": 8192},  # which changes no token unless positions are scaled
        {"rope_theta": 10000.0, "rope_scaling": None},  # as transformers 4 writes the defaults
    ],
)
def test_what_changes_no_token_is_no_difference(fields):
    assert difference(config(), config(**fields)) == ""
    assert difference(config(**fields), config()) == ""


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3_moe", "gemma3", "deepseek_v3", "mamba2", "qwen2_5_vl", "dbrx"]
)
def test_a_config_is_its_own_in_each_form_in_which_transformers_writes_it(kind):
    full = CONFIG_MAPPING[kind]()
    short = json.loads(full.to_json_string(use_diff=True))
    assert difference(short, short) == ""
    if kind not in ("mamba2", "dbrx"):  # whose classes do not read all that they write
        assert difference(short, json.loads(full.to_json_string(use_diff=False))) == ""


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_plain_vllm_refuses_a_run_of_another_config(tmp_path):
    started = write(tmp_path / "started", config())
    model = SimpleNamespace(hf_config_path=None, model=str(started), revision=None)
    client: Any = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    engine: Any = Engine(client, None)  # type: ignore[arg-type]
    assert engine.serves(write(tmp_path / "same", config(eos_token_id=7)))
    with pytest.raises(
        EngineError, match=r"^rope_.*: vLLM was started with another model of the same"
    ) as found:
        engine.serves(write(tmp_path / "other", config(rope_theta=5e5)))
    assert found.value.kind == RouteError.kind


def test_a_config_that_cannot_be_read_is_said_and_an_adapter_has_none(tmp_path, caplog):
    version = write(tmp_path / "version", config())
    (tmp_path / "none").mkdir()
    require_same(str(tmp_path / "none"), None, version, "vLLM")
    assert "is not compared with the run's" in caplog.text
    require_same(str(version), None, tmp_path / "none", "vLLM")
