"""A whole game, token by token, as TRL's rollout loop renders and parses it."""

from itertools import product
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

import trainer.policies
from env_space import wordle as env
from trainer.policies.solver import feedback
from trainer.policies.wordle_tokens import CALL, TURN_TOKENS, WordleTokens, build_wordle_tokenizer

SHIPPED = Path(trainer.policies.__file__).parent / "wordle-tiny"
WORDS = ["crane", "eerie", "speed", "there", "abide"]


def guess(word: str) -> str:
    """Guess a word.

    Args:
        word: A five-letter word.
    """
    return word  # only its schema is used


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Saved and loaded again: what must survive that includes the response template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_wordle_tokenizer(WORDS).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return WordleTokens(tokenizer)


def render(tokenizer, messages):
    return tokenizer.apply_chat_template(
        messages, return_dict=False, add_generation_prompt=True, tools=[guess]
    )


@pytest.mark.parametrize("secret", ["crane", "abbey"])
def test_every_turn_of_a_game_extends_the_tokens_of_the_last(tokenizer, tokens, secret):
    game = env.Game(secret, frozenset([*WORDS, secret]))
    messages = [{"role": "user", "content": env.OPENING}]
    held = list(tokens.prompt)
    for word in ["eerie", "a1+", "speed", "speed", "abide", "crane"]:
        assert render(tokenizer, messages) == held
        turn = tokens.call(word)
        message = parse_response(tokenizer, turn, prefix=held, tools=[guess])
        assert message["tool_calls"] == [
            {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
        ]
        move = game.guess(word)
        messages += [message, {"role": "tool", "name": "guess", "content": move.observation}]
        held += turn + tokens.response(word, move.feedback or None, move.done)
    assert game.over
    assert render(tokenizer, messages) == held
    ending = parse_response(tokenizer, [tokens.end_of_turn], prefix=held, tools=[guess])
    assert ending == {"role": "assistant", "content": ""}


def test_nothing_stands_beside_a_guess(tokenizer, tokens):
    """Of every turn that a server can return: `TURN_TOKENS` at most, nothing behind a stop token."""
    pieces = [*tokenizer.convert_tokens_to_ids([CALL, "crane", "a1+"]), *tokens.stops]
    turns = [list(turn) for n in range(1, TURN_TOKENS + 1) for turn in product(pieces, repeat=n)]
    turns = [turn for turn in turns if not set(turn[:-1]) & set(tokens.stops)]
    guesses = {tuple(turn): guessed(tokenizer, tokens, turn) for turn in turns}
    assert {turn: words for turn, words in guesses.items() if any(words)} == {
        tuple(tokens.call("crane")): ["crane"],
        tuple(tokens.call("a1+")): ["a1+"],
    }
    known = [turn for turn in turns if tokens.is_call(turn) and tokens.called_word(turn)]
    assert known == [tokens.call("crane")]


def guessed(tokenizer, tokens, turn):
    message = parse_response(tokenizer, turn, prefix=tokens.prompt, tools=[guess])
    return [call["function"]["arguments"]["word"] for call in message.get("tool_calls", [])]


def test_the_template_keeps_prefixes_in_the_eyes_of_trl(tokenizer):
    assert is_chat_template_prefix_preserving(tokenizer)


@pytest.mark.parametrize("text", ["{'error': 'the game is over'}", "naïve 🙂 crane\n<tool_call>"])
def test_any_other_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("secret", WORDS)
@pytest.mark.parametrize("word", WORDS)
def test_the_solver_marks_as_the_environment_does(word, secret):
    assert feedback(word, secret) == env.feedback(word, secret)
