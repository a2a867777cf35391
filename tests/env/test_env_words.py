"""The word lists, and the secrets that seeds name."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

import env_space
from env_space.wordle import answers, guesses, secret_for

WORDS = Path(env_space.__file__).parent / "words"


def read(name):
    return (WORDS / name).read_text("ascii").split()


@pytest.mark.parametrize(("name", "least"), [("answers.txt", 3000), ("guesses.txt", 6000)])
def test_lists_are_sorted_five_letter_words_without_duplicates(name, least):
    words = read(name)
    assert len(words) > least
    assert words == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in words)


def test_every_answer_can_be_guessed_and_no_withheld_word_is_an_answer():
    assert set(read("answers.txt")) <= guesses()
    assert set(read("withheld.txt")) <= guesses()
    assert not set(read("withheld.txt")) & set(answers())


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
    assert answers(5) == ("yoked", "hunks", "heard", "creak", "stoop")
    assert [secret_for(seed, answers()) for seed in (0, 1, 2, -1)] == ["lusty", "beret", "fable", "hewed"]


def test_another_process_draws_the_same_secrets():
    script = (
        "import json; from env_space.wordle import answers, secret_for;"
        "print(json.dumps([secret_for(seed, answers(500)) for seed in range(50)]))"
    )
    root = Path(env_space.__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, check=True).stdout
    assert json.loads(out) == [secret_for(seed, answers(500)) for seed in range(50)]


def test_seeds_reach_nearly_every_answer_evenly():
    words = answers(100)
    drawn = [secret_for(seed, words) for seed in range(5000)]
    assert set(drawn) == set(words)
    assert max(map(drawn.count, words)) < 100
