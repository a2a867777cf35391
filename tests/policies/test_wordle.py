"""The shipped Wordle policy, and the recipe that makes it."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from env_space import wordle as env
from env_space.app import create_app
from env_space.settings import Settings
from tests.policies.serving import serving
from tests.policies.test_wordle_tokens import SHIPPED
from trainer.policies import wordle
from trainer.policies.player import play
from trainer.policies.wordle_tokens import WordleTokens

ANSWERS = env.answers(wordle.WORDS)


@pytest.fixture(scope="module")
def tokens():
    return WordleTokens(AutoTokenizer.from_pretrained(SHIPPED))


@pytest.fixture(scope="module")
def games(tokens):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    return play(model, tokens, tokens.words * 4, torch.Generator().manual_seed(1))


def test_the_shipped_policy_knows_the_answers_of_the_environment(tokens):
    assert tuple(tokens.words) == ANSWERS


def test_the_shipped_policy_starts_weak_but_not_hopeless(games):
    assert 0.04 < sum(game.solved for game in games) / len(games) < 0.15


def test_the_shipped_policy_calls_the_tool_properly(games):
    assert sum(game.malformed for game in games) / len(games) < 0.05
    assert sum(None in game.guesses for game in games) / len(games) < 0.05


def test_generation_of_the_shipped_policy_ends_with_the_call(tokens):
    assert GenerationConfig.from_pretrained(SHIPPED).eos_token_id == tokens.stops


def test_the_shipped_weights_are_small_and_bf16():
    weights = load_file(SHIPPED / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1_000_000


def test_the_recipe_is_reproducible_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(wordle, "LEARN_STEPS", 8)
    for name, seed in [("one", 0), ("two", 0), ("other", 1)]:
        wordle.build(list(ANSWERS), tmp_path / name, seed)
    one, two, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").dtype == torch.bfloat16


def test_words_come_from_a_file_in_any_order(tmp_path):
    file = tmp_path / "answers.txt"
    file.write_text("\n".join(sorted(env.answers())), encoding="utf-8")
    assert tuple(wordle.read_words(str(file))) == ANSWERS


def test_words_come_from_a_running_environment():
    with serving(create_app(Settings(answers=200))) as url:
        assert tuple(wordle.read_words(url)) == ANSWERS
