"""What is shown to a policy before RL, and that it comes to a low-rank change of its matrices."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.research import imitation
from bench.research.wordle_policy import read_words, secrets_of
from examples import tiny_policy as tiny
from trainer.policies import smollm2
from trainer.policies.tokens import CHAT_TEMPLATE, build_tokenizer

WORDS = read_words(imitation._WORDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tiny.build(folder := tmp_path_factory.mktemp("policies") / "base", tie=True, seed=0)
    return folder


def test_a_policy_learns_what_it_writes_itself_and_nothing_else():
    tokenizer, taught = build_tokenizer(), imitation.TASKS["wordle"]
    tokenizer.chat_template = smollm2.SYSTEM_TEMPLATE + CHAT_TEMPLATE
    chat = next(imitation.games(tokenizer, seed=0))
    ids, own = imitation.row(tokenizer, chat, taught.tools)
    words = [message["tool_calls"][0]["function"]["arguments"]["word"] for message in chat[1:-1:2]]
    call = '<tool_call>\n{{"name": "guess", "arguments": {{"word": "{}"}}}}\n</tool_call><|im_end|>'
    assert tokenizer.decode([ids[place] for place in own]) == "".join(map(call.format, words)) + "<|im_end|>"
    assert "Guess the secret word." in tokenizer.decode(ids[: own[0]])


def test_a_reversal_is_shown_with_its_answer():
    tokenizer = build_tokenizer([f"Ġ{a}{b}{c}" for a, b, c in itertools.product("abcd", repeat=3)])
    ids, own = imitation.row(tokenizer, next(imitation.reversals(tokenizer, seed=0)), [])
    asked = tokenizer.decode(ids[: own[0]]).split("user\n")[1].split("<|im_end|>")[0]
    shown = tokenizer.decode([ids[place] for place in own])
    assert shown == f"<reversed_text>{asked[::-1]}</reversed_text><|im_end|>"


def test_no_game_that_is_shown_has_a_held_out_secret():
    shown = itertools.islice(imitation.games(build_tokenizer(), seed=0), 300)
    solved = [chat for chat in shown if "+2+3+4+5+" in "".join(chat[-2]["content"][1::2])]
    secrets = {chat[-2]["content"][:10:2] for chat in solved}
    assert secrets <= set(secrets_of(WORDS))


def test_imitation_changes_matrices_by_a_low_rank_and_nothing_else(base, tmp_path):
    imitation.teach(base, "wordle", tmp_path / "adapter", steps=2)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    after = smollm2.with_adapter(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    changes = {name: weight - before.get_parameter(name) for name, weight in after.named_parameters()}
    changed = {name for name, change in changes.items() if change.any()}
    assert changed == {name for name in changes if name.endswith("proj.weight")}
    assert all(torch.linalg.matrix_rank(changes[name], rtol=1e-2) <= imitation.RANK for name in changed)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000
