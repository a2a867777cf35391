"""The game itself: feedback, observations, rules and rewards."""

import random
from itertools import product

import pytest

from env_space.wordle import Game, GameOverError, answers, feedback, guesses


def reference(guess, secret):
    """Feedback by counting instead of using letters up: a yellow needs a copy beyond those to its left."""

    def mark(i):
        letter = guess[i]
        if secret[i] == letter:
            return "+"
        misplaced_in_secret = sum(s == letter != g for g, s in zip(guess, secret, strict=True))
        misplaced_before = sum(g == letter != s for g, s in zip(guess[:i], secret[:i], strict=True))
        return "?" if misplaced_before < misplaced_in_secret else "-"

    return "".join(map(mark, range(5)))


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
    assert feedback(guess, secret) == marks == reference(guess, secret)


def test_feedback_equals_the_reference_on_every_pattern_of_three_letters():
    words = ["".join(letters) for letters in product("abc", repeat=5)]
    assert all(feedback(g, s) == reference(g, s) for g in words for s in words)


def test_feedback_equals_the_reference_on_real_words():
    rng = random.Random(0)
    allowed, secrets = sorted(guesses()), answers()
    pairs = [(rng.choice(allowed), rng.choice(secrets)) for _ in range(30_000)]
    assert all(feedback(g, s) == reference(g, s) for g, s in pairs)


def play(secret, *words):
    game = Game(secret, guesses())
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
    assert moves[-1].reward == pytest.approx(0.2 * 2 / 5)
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
    assert move.reward_parts.letters == 0
    assert move.reward == pytest.approx(-0.05)
    assert game.turns == 1


def test_six_invalid_words_end_the_game():
    _, moves = play("bride", *["abcde"] * 6)
    assert moves[-1].observation == "not a word game over"
    assert moves[-1].reward == pytest.approx(-0.3)


def test_an_invalid_word_keeps_the_credit_earned_before():
    _, moves = play("bride", "crane", "bridx")
    assert moves[-1].reward_parts.letters == pytest.approx(0.08)
    assert moves[-1].reward == pytest.approx(0.03)


def test_a_repeated_word_is_named_and_played():
    _, moves = play("bride", "crane", "CRANE")
    assert moves[1].message == "'crane' was already guessed in turn 1."
    assert moves[1].valid
    assert moves[1].observation == moves[0].observation


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
