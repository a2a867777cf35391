"""The game: words, feedback, rules and rewards; and the store in which games live, end and expire."""

from collections import Counter
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

import env_space
from env_space.game import Game, GameError, Rules, answers, feedback, guesses
from env_space.sessions import Origin, Sessions
from env_space.settings import Settings
from tests.env_space.service import guess, sentence, service

WORDS = Path(env_space.__file__).parent / "words"


def read(name):
    return (WORDS / name).read_text("ascii").split()


SIZES = {4: (1904, 3437), 5: (3532, 6734), 6: (5397, 11176), 7: (6827, 15844)}
EACH_LENGTH = pytest.mark.parametrize("length", SIZES)


@EACH_LENGTH
def test_lists_are_sorted_words_of_one_length_without_duplicates(length):
    lists = read(f"answers-{length}.txt"), read(f"guesses-{length}.txt")
    assert tuple(map(len, lists)) == SIZES[length]
    for words in lists:
        assert words == sorted(set(words))
        assert all(len(w) == length and w.isascii() and w.isalpha() and w.islower() for w in words)


@EACH_LENGTH
def test_every_answer_can_be_guessed_and_no_withheld_word_is_an_answer(length):
    withheld = {word for word in read("withheld.txt") if len(word) == length}
    assert len(withheld) > 5
    assert set(answers(length=length)) | withheld <= guesses(length)
    assert not withheld & set(answers(length=length))


def test_the_notice_names_the_owners_of_the_lists():
    notice = (WORDS / "NOTICE").read_text("utf-8")
    assert "Copyright 2000-2011 by Kevin Atkinson" in notice
    assert "permission notice appear in" in notice


def test_secrets_stay_what_they_were():
    """Published results name seeds, so a seed must keep its secret."""
    rules = Rules(Settings())
    assert answers(5) == ("yoked", "hunks", "heard", "creak", "stoop")
    assert [rules.deal(seed).secret for seed in (0, 1, 2, -1)] == ["lorry", "serum", "hurls", "scope"]
    assert [rules.deal(seed, "held_out").secret for seed in (0, 1, 2)] == ["lemon", "adobe", "merry"]


def by_counting(guess, secret):
    """The feedback by another way: a letter is elsewhere if fewer copies of it that are not in place stand to
    its left in the guess than the secret has copies of it where the guess has something else."""
    wanted = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = ""
    for place, (g, s) in enumerate(zip(guess, secret, strict=True)):
        before = sum(guess[i] == g != secret[i] for i in range(place))
        marks += "+" if g == s else "?" if before < wanted[g] else "-"
    return marks


def test_feedback_equals_that_by_counting_on_every_pattern_of_three_letters():
    words = ["".join(letters) for letters in product("abc", repeat=5)]
    assert all(feedback(guess, word) == by_counting(guess, word) for guess, word in product(words, words))


def play(secret, *words, **rules):
    game = Game(secret, guesses(len(secret)), Settings(**rules))
    return game, [game.guess(word) for word in words]


def test_six_wrong_guesses_end_the_game_with_credit_for_the_closest():
    game, moves = play("bride", "crane", "zonal", "zonal", "zonal", "zonal", "zonal")
    assert [move.done for move in moves] == [False] * 5 + [True]
    assert moves[-1].observation.endswith(" game over")
    assert not moves[-1].solved
    assert [move.secret for move in moves] == [""] * 5 + ["bride"]
    assert moves[-1].reward == pytest.approx(0.2 * 2 / 5 - 4 * 0.05)
    with pytest.raises(GameError):
        game.guess("bride")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("abcde", "'abcde' is not in the word list."),
        ("bridexx", "'bridexx' has 7 letters; a guess must have 5."),
        ("bri", "'bri' has 3 letters; a guess must have 5."),
        ("brid3", "'brid3' has characters other than the letters a to z."),
        ("brïde", "'brïde' has characters other than the letters a to z."),
        ("bride ", "'bride ' has characters other than the letters a to z."),
        ("", "'' has characters other than the letters a to z."),
        ("é" * 5000, f"'{'é' * 20}...' has characters other than the letters a to z."),
    ],
)
def test_an_invalid_word_is_named_costs_a_turn_and_earns_no_letter_credit(word, sentence):
    game, [move] = play("bride", word)
    assert (move.observation, move.message) == ("not a word", sentence)
    assert (move.turn, move.valid, move.feedback) == (1, False, "")
    assert (move.reward_parts.greens, move.reward_parts.yellows) == (0, 0)
    assert move.reward == pytest.approx(-0.05)
    assert game.turns == 1


def test_a_repeated_word_is_named_costs_and_earns_no_letters():
    game, moves = play("bride", "crane", "CRANE", "crane")
    assert [move.message for move in moves[1:]] == ["'crane' was already guessed in turn 1."] * 2
    assert moves[1].valid
    assert moves[1].observation == moves[0].observation
    assert moves[2].reward_parts.repetition == pytest.approx(-0.1)
    assert moves[2].reward_parts.greens == moves[0].reward_parts.greens
    assert (game.repeated, game.invalid) == (2, 0)


def test_invalid_words_count_each_time_keep_the_credit_and_end_the_game():
    game, moves = play("bride", "crane", *["bridx"] * 5)
    assert moves[-1].observation == "not a word game over"
    parts = moves[-1].reward_parts
    assert (parts.greens, parts.invalid, parts.repetition) == (pytest.approx(0.08), pytest.approx(-0.25), 0)
    assert (game.repeated, game.invalid) == (0, 5)


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
    assert move.message == f"'crane' has 5 letters; a guess must have {len(secret)}."
    _, [move] = play(secret, secret)
    assert move.solved
    assert move.reward == pytest.approx(1.45)


def test_giving_up_costs_once_and_only_before_the_end():
    game, _ = play("bride", "crane")
    game.give_up()
    game.give_up()
    assert game.reward_parts().gave_up == -0.2
    assert game.reward_parts().total == pytest.approx(0.08 - 0.2)
    with pytest.raises(GameError):
        game.guess("bride")
    for words in (["bride"], ["zonal"] * 6):
        over, moves = play("bride", *words)
        over.give_up()
        assert over.reward_parts() == moves[-1].reward_parts


@pytest.mark.parametrize(("answers", "held_out"), [(None, 353), (128, 12), (10, 1), (9, 0), (1, 0)])
def test_a_tenth_of_the_secrets_is_held_out(answers, held_out):
    rules = Rules(Settings(answers=answers))
    assert len(rules.held_out) == held_out
    assert not set(rules.train) & set(rules.held_out)


def test_no_training_game_has_a_held_out_secret_and_the_other_way_round():
    rules = Rules(Settings(answers=30))
    trained = {rules.deal(seed).secret for seed in range(500)}
    held_out = {rules.deal(seed, "held_out").secret for seed in range(500)}
    assert trained == set(rules.train)
    assert held_out == set(rules.held_out)


def test_without_held_out_words_such_a_game_is_refused_with_a_sentence():
    refusal = service(answers=9).post("/sessions", json={"seed": 1, "split": "held_out"})
    assert sentence(refusal, 422) == "Of 9 answers, none is held out: set WORDLE_ANSWERS to at least 10."


def test_length_and_hard_mode_and_costs_reach_the_games():
    client = service(length=6, hard_mode=True, invalid_cost=0.3, repeated_cost=0.2)
    words = client.get("/words").json()
    opened = client.post("/sessions", json={"seed": 3}).json()
    game = f"/sessions/{opened['session']}"
    tried = ["cranes", "cranes", "zzzzzz", "crane"]
    moves = [guess(client, game, word, turn).json() for turn, word in enumerate(tried, 1)]
    assert (opened["length"], opened["hard_mode"], words["length"]) == (6, True, 6)
    assert {len(word) for word in words["answers"]} == {6}
    assert len(moves[0]["feedback"]) == 6
    assert moves[-1]["reward_parts"]["repetition"] == pytest.approx(-0.2)
    assert moves[-1]["reward_parts"]["invalid"] == pytest.approx(-0.6)


TTL_S = 10.0


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def sessions(clock):
    return Sessions(2, TTL_S, clock=lambda: clock.now)


def start(sessions, id=None, seed=1, split="train"):
    return sessions.open(id or uuid4(), Origin(seed, split), Game("bride", guesses())).id


@pytest.mark.finding(10)
def test_a_game_expires_after_its_last_new_move_and_retries_do_not_keep_it_alive(sessions, clock):
    used = start(sessions)
    unused = start(sessions)
    clock.now += TTL_S / 2
    sessions.play(used, 1, "crane")
    clock.now += TTL_S / 2
    assert len(sessions) == 1
    assert sessions.close(unused).gave_up
    with pytest.raises(GameError, match=r"expired after 10 s without a move; start a new one"):
        sessions.play(unused, 1, "crane")
    clock.now += TTL_S / 2 - 1
    sessions.play(used, 1, "crane")
    start(sessions, used)
    assert len(sessions) == 1
    clock.now += 1
    assert len(sessions) == 0


def test_a_game_that_ended_is_forgotten_in_the_end(sessions, clock):
    id = start(sessions)
    sessions.close(id)
    clock.now += TTL_S
    with pytest.raises(GameError, match="is unknown"):
        sessions.close(id)


def test_no_more_games_that_ended_are_kept_than_may_be_in_play(sessions):
    oldest, *later = ids = [uuid4() for _ in range(3)]
    for id in ids:
        sessions.close(start(sessions, id))
    with pytest.raises(GameError):
        sessions.close(oldest)
    assert all(sessions.close(id).gave_up for id in later)


def test_an_id_belongs_to_its_seed_and_to_one_game(sessions):
    id = start(sessions, seed=1)
    with pytest.raises(GameError, match="with seed 1 of split train, not 2 of train: choose a new id"):
        start(sessions, id, seed=2)
    with pytest.raises(GameError, match="not 1 of held_out"):
        start(sessions, id, split="held_out")
    sessions.close(id)
    with pytest.raises(GameError, match="has ended: choose a new id"):
        start(sessions, id, seed=1)


def test_every_game_is_reported_once_as_it_ends(clock):
    ended = []
    sessions = Sessions(9, TTL_S, ended.append, lambda: clock.now)
    solved = start(sessions)
    closed = start(sessions)
    expired = start(sessions)
    sessions.play(solved, 1, "bride")
    sessions.close(solved)
    sessions.close(closed)
    sessions.close(closed)
    clock.now += TTL_S
    sessions.reap()
    sessions.reap()
    assert [session.id for session in ended] == [solved, closed, expired]
    assert [session.expired for session in ended] == [False, False, True]
    assert ended[2].used_at - ended[2].opened_at == TTL_S
