"""The word lists, and the secrets that seeds name."""

from hashlib import sha256
from pathlib import Path

import pytest

import env_space
from env_space.rules import rules_from
from env_space.settings import Settings
from env_space.wordle import answers, guesses, secret_for

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


def test_fewer_answers_are_the_first_of_more_in_the_order_of_their_sha256():
    assert answers(300) == answers()[:300]
    digests = [sha256(word.encode()).hexdigest() for word in answers()]
    assert digests == sorted(digests)


@pytest.mark.parametrize("n", [0, -1, 10**6])
def test_an_impossible_number_of_answers_is_refused(n):
    with pytest.raises(ValueError, match=r"^There are \d+ answers; ask for 1 to \d+ of them, not -?\d+\.$"):
        answers(n)


def test_secrets_stay_what_they_were():
    """Published results name seeds, so a seed must keep its secret."""
    rules = rules_from(Settings())
    assert answers(5) == ("yoked", "hunks", "heard", "creak", "stoop")
    assert [rules.deal(seed).secret for seed in (0, 1, 2, -1)] == ["lorry", "serum", "hurls", "scope"]
    assert [rules.deal(seed, "held_out").secret for seed in (0, 1, 2)] == ["lemon", "adobe", "merry"]


def test_seeds_reach_nearly_every_answer_evenly():
    words = answers(100)
    drawn = [secret_for(seed, words) for seed in range(5000)]
    assert set(drawn) == set(words)
    assert max(map(drawn.count, words)) < 100
