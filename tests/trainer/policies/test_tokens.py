"""A whole game, token by token, as TRL's rollout loop renders and parses it."""

from itertools import product

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

from env_space import game as env
from trainer.policies.tokens import CALL, LETTERS, TURN_TOKENS, WordleTokens, build_wordle_tokenizer

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
    build_wordle_tokenizer().save_pretrained(folder)
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
    for word in ["eerie", "zzz", "speed", "speed", "abide", "crane"]:
        assert render(tokenizer, messages) == held
        turn = tokens.call(word)
        message = parse_response(tokenizer, turn, prefix=held, tools=[guess])
        assert message["tool_calls"] == [
            {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
        ]
        move = game.guess(word)
        messages += [message, {"role": "tool", "name": "guess", "content": move.observation}]
        held += turn + tokens.response(move.observation)
    assert game.over
    assert render(tokenizer, messages) == held
    ending = parse_response(tokenizer, [tokens.end_of_turn], prefix=held, tools=[guess])
    assert ending == {"role": "assistant", "content": ""}


def test_a_turn_is_few_tokens(tokens):
    """A letter is one, as is a mark and all that TRL's chat puts around them: generation takes the time."""
    assert len(tokens.prompt) == 4
    assert len(tokens.call("crane")) == TURN_TOKENS == LETTERS + 2
    assert len(tokens.response("c1-r2?a3+n4-e5-")) == LETTERS + 4


def test_nothing_stands_beside_a_guess(tokenizer, tokens):
    """Of every turn that a server can return: `TURN_TOKENS` at most, nothing behind a stop token."""
    a, b = tokens.call("ab")[1:-1]
    pieces = [*tokenizer.convert_tokens_to_ids([CALL, "a1+"]), a, b, *tokens.stops]
    turns = [list(turn) for n in (1, 2, 3, 4) for turn in product(pieces, repeat=n)]
    turns = [
        turn + [b] * (TURN_TOKENS - 1 - len(turn)) + [end] for turn in turns for end in (b, *tokens.stops)
    ]
    turns = [turn for turn in turns if not set(turn[:-1]) & set(tokens.stops)]
    for turn in turns:
        whole = [word for word in guessed(tokenizer, tokens, turn) if len(word) == LETTERS and word.isalpha()]
        assert not whole or turn == tokens.call(whole[0])
        word = tokens.called_word(turn)
        assert whole == [word] * (word is not None and len(word) == LETTERS and word.isalpha())


def guessed(tokenizer, tokens, turn):
    message = parse_response(tokenizer, turn, prefix=tokens.prompt, tools=[guess])
    return [call["function"]["arguments"]["word"] for call in message.get("tool_calls", [])]


def test_the_template_keeps_prefixes_in_the_eyes_of_trl(tokenizer):
    assert is_chat_template_prefix_preserving(tokenizer)


@pytest.mark.parametrize("text", ["{'error': 'the game is over'}", "naïve 🙂 crane\n<tool_call>"])
def test_any_other_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
