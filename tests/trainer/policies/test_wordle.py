"""The shipped Wordle policy, and the code that plays with it."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import trainer.policies
from env_space import game as env
from env_space.game import rules_from
from env_space.settings import Settings
from trainer.policies.tokens import WordleTokens
from trainer.tasks.held_out import Reply, _Turns, play

SHIPPED = Path(trainer.policies.__file__).parent / "wordle-tiny"
HELD_OUT = rules_from(Settings()).held_out
GAMES = 60


@pytest.fixture(scope="module")
def tokens():
    return WordleTokens(AutoTokenizer.from_pretrained(SHIPPED))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def games(model, tokens):
    """By the environment's rules, on words that are no secrets in training."""
    dealt = [env.Game(env.secret_for(seed, HELD_OUT), env.guesses()) for seed in range(GAMES)]

    def referee(calls):
        moves = [dealt[number].guess(word) for number, word in calls]
        return [Reply(move.observation, move.done, move.solved) for move in moves]

    play(model, tokens, GAMES, referee, torch.Generator().manual_seed(1))
    return dealt


def test_the_shipped_policy_plays_whole_games_with_words_that_it_spells(games):
    moves = [move for game in games for move in game.moves]
    assert sum(game.over for game in games) > 0.95 * GAMES
    assert sum(move.valid for move in moves) > 0.7 * len(moves)
    assert len({move.word for move in moves if move.valid}) > 100, "not a few words again and again"


def test_the_shipped_policy_uses_some_of_the_feedback_and_not_all(games):
    """A letter that is known to be absent comes back less often than in a game where it is not known."""
    own = sum(absent_again(game.moves, game.moves) for game in games)
    others = sum(absent_again(a.moves, b.moves) for a, b in itertools.pairwise(games))
    assert 0.1 * others < own < 0.8 * others


def absent_again(told: list[env.Move], later: list[env.Move]) -> int:
    """How often the guesses after the first have letters that `told` has marked absent in its first."""
    return sum(letter in absent(told[0]) for move in later[1:] for letter in move.word)


def absent(move: env.Move) -> set[str]:
    marks = list(zip(move.word, move.feedback, strict=False))  # no marks: not a word
    return {letter for letter, mark in marks if mark == "-"} - {
        letter for letter, mark in marks if mark != "-"
    }


def test_generation_of_the_shipped_policy_ends_with_the_call(tokens):
    assert GenerationConfig.from_pretrained(SHIPPED).eos_token_id == tokens.stops


def test_the_shipped_weights_are_small_and_bf16():
    weights = load_file(SHIPPED / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert 0.9e6 < sum(tensor.numel() for tensor in weights.values()) < 1.2e6
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 3_000_000


def test_games_side_by_side_are_sampled_as_each_alone(model, tokens, monkeypatch):
    """Of different lengths, and after one of them is gone. The likeliest token is taken, not a random one."""
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: generate(**options | {"do_sample": False}))
    words, together = [["crane", "slate"], ["ab"], ["speed"]], _Turns(model, tokens, 3)
    games = [sum(map(tokens.call, some), list(tokens.prompt)) for some in words]
    for chosen in ([0, 1, 2], [0, 2]):
        games = [games[place] for place in chosen]
        together.keep(chosen)
        turns = together.sample(games)
        assert turns == [_Turns(model, tokens, 1).sample([game])[0] for game in games]
        games = [
            game + turn + tokens.response("c1-r2?a3+n4-e5-") for game, turn in zip(games, turns, strict=True)
        ]
