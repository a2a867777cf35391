"""The game itself: feedback, observations, rules and rewards."""

import random
from dataclasses import asdict
from itertools import product

import pytest

from env_space.rewards import Costs
from env_space.wordle import Game, GameOverError, answers, feedback, guesses
from tests.env.reference import differences


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "+++++"),
        ("speed", "abide", "--?-?"),
        ("speed", "erase", "?-??-"),
        ("speed", "steal", "+-+--"),
        ("speed", "crepe", "-?+?-"),
        ("allee", "eagle", "??-?+"),
        ("eerie", "there", "?-?-+"),
        ("there", "eerie", "--??+"),
        ("geese", "eerie", "-+?-+"),
        ("llama", "label", "+??--"),
        ("sassy", "essay", "??+-+"),
        ("abbey", "babes", "??++-"),
        ("mummy", "maxim", "+-?--"),
    ],
)
def test_known_hard_cases_of_repeated_letters(guess, secret, marks):
    assert feedback(guess, secret) == marks
    assert differences([guess], [secret]) == []


def test_feedback_equals_the_reference_on_every_pattern_of_three_letters():
    words = ["".join(letters) for letters in product("abc", repeat=5)]
    assert differences(words, words) == []


@pytest.mark.parametrize("words", [30, pytest.param(2600, marks=pytest.mark.long)])
def test_feedback_equals_the_reference_on_many_pairs_of_real_words(words):
    """30 000 pairs, or 2.6 millions; `python -m tests.env.reference` compares other 6.8 millions."""
    assert differences(random.Random(0).sample(sorted(guesses()), words), list(answers()[:1000])) == []


@pytest.mark.parametrize("length", [4, 6, 7])
def test_feedback_equals_the_reference_on_words_of_other_lengths(length):
    allowed, secrets = sorted(guesses(length)), answers(length=length)
    assert differences(random.Random(0).sample(allowed, 100), list(secrets[:300])) == []


def play(secret, *words, **rules):
    game = Game(secret, guesses(len(secret)), **rules)
    return game, [game.guess(word) for word in words]


def test_observation_names_letter_position_and_mark():
    _, [move] = play("bride", "crane")
    assert (move.observation, move.feedback) == ("c1-r2+a3-n4-e5+", "-+--+")
    assert (move.turn, move.valid, move.done, move.solved, move.message) == (1, True, False, False, "")


def test_solving_ends_the_game_and_pays_for_every_guess_left_over():
    game, moves = play("bride", "crane", "bride")
    assert moves[-1].observation == "b1+r2+i3+d4+e5+ game over"
    assert moves[-1].done
    assert moves[-1].solved
    assert moves[-1].reward_parts.solved == pytest.approx(1.2)
    assert moves[-1].reward == pytest.approx(1.4)
    with pytest.raises(GameOverError, match="ended after turn 2"):
        game.guess("crane")


def test_six_wrong_guesses_end_the_game_with_credit_for_the_closest():
    game, moves = play("bride", "crane", "zonal", "zonal", "zonal", "zonal", "zonal")
    assert [move.done for move in moves] == [False] * 5 + [True]
    assert moves[-1].observation.endswith(" game over")
    assert not moves[-1].solved
    assert [move.secret for move in moves] == [""] * 5 + ["bride"]
    assert moves[-1].reward == pytest.approx(0.2 * 2 / 5 - 4 * 0.05)
    with pytest.raises(GameOverError):
        game.guess("bride")


def test_a_solve_on_the_last_guess_earns_exactly_one_for_solving():
    _, moves = play("bride", *["zonal"] * 5, "bride")
    assert moves[-1].reward_parts.solved == 1


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("abcde", "'abcde' is not in the word list."),
        ("bridexx", "'bridexx' has 7 letters; a guess has 5."),
        ("bri", "'bri' has 3 letters; a guess has 5."),
        ("brid3", "'brid3' is not made of the letters a to z."),
        ("brïde", "'brïde' is not made of the letters a to z."),
        ("bride ", "'bride ' is not made of the letters a to z."),
        ("", "'' is not made of the letters a to z."),
        ("é" * 5000, f"'{'é' * 20}...' is not made of the letters a to z."),
    ],
)
def test_an_invalid_word_is_named_costs_a_turn_and_earns_no_letter_credit(word, sentence):
    game, [move] = play("bride", word)
    assert (move.observation, move.message) == ("not a word", sentence)
    assert (move.turn, move.valid, move.feedback) == (1, False, "")
    assert (move.reward_parts.greens, move.reward_parts.yellows) == (0, 0)
    assert move.reward == pytest.approx(-0.05)
    assert game.turns == 1


def test_six_invalid_words_end_the_game():
    _, moves = play("bride", *["abcde"] * 6)
    assert moves[-1].observation == "not a word game over"
    assert moves[-1].reward == pytest.approx(-0.3)


def test_an_invalid_word_keeps_the_credit_earned_before():
    _, moves = play("bride", "crane", "bridx")
    assert moves[-1].reward_parts.greens == pytest.approx(0.08)
    assert moves[-1].reward == pytest.approx(0.03)


def test_a_repeated_word_is_named_costs_and_earns_no_letters():
    game, moves = play("bride", "crane", "CRANE", "crane")
    assert [move.message for move in moves[1:]] == ["'crane' was already guessed in turn 1."] * 2
    assert moves[1].valid
    assert moves[1].observation == moves[0].observation
    assert moves[2].reward_parts.repetition == pytest.approx(-0.1)
    assert moves[2].reward_parts.greens == moves[0].reward_parts.greens
    assert (game.tally.repeated, game.tally.invalid) == (2, 0)


def test_a_repeated_invalid_word_is_invalid_and_nothing_else():
    game, moves = play("bride", "bridx", "bridx")
    assert (moves[1].reward_parts.invalid, moves[1].reward_parts.repetition) == (pytest.approx(-0.1), 0)
    assert (game.tally.repeated, game.tally.invalid) == (0, 2)


def test_wasted_guesses_cost_what_the_costs_say():
    _, moves = play("bride", "crane", "crane", "bridx", costs=Costs(invalid=0.5, repeated=0.25))
    assert moves[2].reward_parts.repetition == pytest.approx(-0.25)
    assert moves[2].reward_parts.invalid == pytest.approx(-0.5)


def test_letters_are_those_of_the_closest_guess_and_a_yellow_counts_half():
    _, moves = play("bride", "dried", "zonal", "pride")
    parts = [(move.reward_parts.greens, move.reward_parts.yellows) for move in moves]
    assert parts[0] == (pytest.approx(0.2 * 2 / 5), pytest.approx(0.2 * 2 / 2 / 5))  # d?r+i+e?d-
    assert parts[1] == parts[0]
    assert parts[2] == (pytest.approx(0.2 * 4 / 5), 0)


def test_the_reward_is_the_sum_of_its_parts():
    _, moves = play("bride", "crane", "crane", "bridx", "bride")
    parts = asdict(moves[-1].reward_parts)
    assert moves[-1].reward == pytest.approx(sum(parts.values()))
    assert parts == pytest.approx(
        {"solved": 1.1, "greens": 0.2, "yellows": 0, "repetition": -0.05, "invalid": -0.05, "gave_up": 0}
    )


@pytest.mark.parametrize(
    ("secret", "first", "word", "sentence"),
    [
        ("bride", "crane", "bumpy", "Hard mode: letter 2 of a guess must be 'r', as 'crane' showed."),
        ("bride", "dream", "crane", "Hard mode: a guess must contain 'd', as 'dream' showed."),
        ("geese", "eerie", "remit", "Hard mode: letter 5 of a guess must be 'e', as 'eerie' showed."),
        ("label", "llama", "lucky", "Hard mode: a guess must contain 'l' 2 times, as 'llama' showed."),
    ],
)
def test_hard_mode_names_the_hint_that_a_guess_ignores(secret, first, word, sentence):
    _, moves = play(secret, first, word, hard_mode=True)
    assert (moves[1].message, moves[1].valid, moves[1].feedback) == (sentence, False, "")
    assert moves[1].reward_parts.invalid == pytest.approx(-0.05)
    assert play(secret, first, word)[1][1].valid, "without hard mode the word is fine"


def test_hard_mode_allows_what_uses_every_hint_and_remembers_all_guesses():
    _, moves = play("bride", "crane", "gripe", "crime", "bride", hard_mode=True)
    assert [move.valid for move in moves] == [True, True, True, True]
    _, moves = play("bride", "gripe", "zonal", "crane", hard_mode=True)
    assert [move.valid for move in moves] == [True, False, False]
    assert moves[2].message.endswith("as 'gripe' showed.")


@pytest.mark.parametrize(
    ("secret", "guess", "marks"), [("tree", "reed", "??+-"), ("letters", "settler", "?+++???")]
)
def test_words_of_other_lengths(secret, guess, marks):
    _, [move] = play(secret, guess)
    assert (move.feedback, move.valid) == (marks, True)
    _, [move] = play(secret, "crane")
    assert move.message == f"'crane' has 5 letters; a guess has {len(secret)}."
    _, [move] = play(secret, secret)
    assert move.solved
    assert move.reward == pytest.approx(1.45)


def test_giving_up_costs_once_and_only_before_the_end():
    game, _ = play("bride", "crane")
    game.give_up()
    game.give_up()
    assert game.reward_parts().gave_up == -0.2
    assert game.reward_parts().total == pytest.approx(0.08 - 0.2)
    with pytest.raises(GameOverError):
        game.guess("bride")


@pytest.mark.parametrize("words", [["bride"], ["zonal"] * 6])
def test_giving_up_after_the_end_changes_nothing(words):
    game, moves = play("bride", *words)
    game.give_up()
    assert game.reward_parts() == moves[-1].reward_parts
