"""The random policy for other tests."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.policies import tiny


@pytest.mark.parametrize("tie", [True, False])
def test_it_loads_and_generates(tmp_path, tie):
    tiny.build(tmp_path, tie=tie, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tie
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tie
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say héllo."}], add_generation_prompt=True, return_tensors="pt"
    )
    assert tokenizer.decode(chat["input_ids"][0]).startswith("<|im_start|>user\nSay héllo.<|im_end|>")
    output = model.generate(**chat, max_new_tokens=4, min_new_tokens=4)
    assert output.shape[1] == chat["input_ids"].shape[1] + 4


def test_the_seed_decides_the_bits(tmp_path):
    torch.manual_seed(1)
    for name, seed in [("one", 3), ("two", 3), ("other", 4)]:
        tiny.build(tmp_path / name, tie=True, seed=seed)
    one, two, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
