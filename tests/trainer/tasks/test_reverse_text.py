"""Reverse-text: what is asked, what is right, and what a policy earns; the words come from its tokenizer."""

import itertools
from string import ascii_lowercase

import pytest
from trl.experimental.async_grpo import AsyncGRPOConfig

from examples import tiny_policy as tiny
from trainer.policies.tokens import build_tokenizer
from trainer.settings import Settings
from trainer.tasks import make_task, reverse_text

WORDS = ["".join(letters) for letters in itertools.product(ascii_lowercase[:5], repeat=3)]
TOKENIZER = build_tokenizer([f"Ġ{word}" for word in WORDS])


def test_the_texts_of_a_seed_are_always_the_same_and_those_of_another_are_others():
    first, again, other = (reverse_text.make_dataset(TOKENIZER, 50, seed)["text"][:] for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert {len(text.split()) for text in first} == {3}
    assert set(" ".join(first).split()) <= set(WORDS)


def test_held_out_texts_share_no_word_with_those_of_training():
    trained = set(" ".join(reverse_text.texts(TOKENIZER, 500, seed=1)).split())
    held_out = set(" ".join(reverse_text.texts(TOKENIZER, 500, seed=1, held_out=True)).split())
    assert trained | held_out == set(WORDS)
    assert not trained & held_out


def test_what_is_shown_as_right_earns_all():
    assert reverse_text.similarity(reverse_text.right_answer("red fox"), "red fox") == 1.0


def test_words_that_are_not_one_token_are_not_asked():
    tokenizer = build_tokenizer([*(f"Ġ{word}" for word in WORDS), "abc", "Ġa", "ĠAbc", "Ġab1"])
    assert reverse_text.words_of(tokenizer) == reverse_text.words_of(TOKENIZER)


@pytest.mark.parametrize(
    ("said", "earned"),
    [
        ("<reversed_text>xof der</reversed_text>", 1.0),
        ("Sure! <reversed_text> xof der\n</reversed_text> Anything else?", 1.0),
        ("<reversed_text>xof ded</reversed_text>", 6 / 7),
        ("xof der", 0.0),
        ("<reversed_text>xof der", 0.0),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_an_answer_earns_its_likeness_in_the_first_tags(said, earned):
    completions = [[{"role": "assistant", "content": said}]]
    assert reverse_text.reward_reversed(completions, text=["red fox"]) == [pytest.approx(earned)]


def test_a_row_has_the_prompt_and_what_the_reward_needs():
    [row] = reverse_text.make_dataset(TOKENIZER, 1, seed=0)
    system, user = row["prompt"]
    assert (system["role"], system["content"]) == ("system", reverse_text.PROMPT)
    assert (user["role"], user["content"]) == ("user", row["text"])


def test_a_model_whose_tokenizer_knows_no_words_is_refused_by_name(tmp_path):
    tiny.build(tmp_path / "base", tie=True, seed=0)
    places = {"bucket": "file:///b", "run": "first", "replicas": ["http://x"]}
    script = Settings(model=str(tmp_path / "base"), task="reverse_text", **places)
    with pytest.raises(SystemExit, match=r"--task reverse_text: .* knows 0 English words"):
        make_task(script, AsyncGRPOConfig(str(tmp_path), max_steps=1, use_cpu=True))
