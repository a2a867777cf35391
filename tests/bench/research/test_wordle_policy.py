"""The recipe of the shipped Wordle policy, and the teacher that it imitates."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import env_space
from bench.research import wordle_policy
from bench.research.wordle_policy import Teacher
from env_space import game as env
from env_space.game import ignored_hint, rules_from
from env_space.settings import Settings

WORDS = Path(env_space.__file__).parent / "words" / "answers-5.txt"
HELD_OUT = rules_from(Settings()).held_out


def test_the_recipe_is_reproducible_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(wordle_policy, "BATCH", 2)
    for name, seed in [("one", 0), ("two", 0), ("other", 1)]:
        wordle_policy.build(wordle_policy.read_words(WORDS), tmp_path / name, seed, steps=2)
    one, two, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").dtype == torch.bfloat16


def test_no_secret_of_the_warm_start_is_one_of_the_held_out_words():
    words = wordle_policy.read_words(WORDS)
    assert tuple(words) == env.answers()
    assert set(wordle_policy.secrets_of(words)) == set(words) - set(HELD_OUT)


def test_a_teacher_that_forgets_nothing_guesses_what_fits_all_marks():
    teacher, rng = Teacher(env.answers(), memory=1.0), random.Random(0)
    for secret in ("crane", "abide", "pound", "might", "blush"):
        game = env.Game(secret, frozenset(env.answers()))
        for guess in teacher.game(secret, rng):
            clues = [(move.word, move.feedback) for move in game.moves if move.valid]
            if len(guess.possible):  # else it is a slip
                assert not ignored_hint(guess.text, clues)
                found = {
                    letter
                    for word, marks in clues
                    for letter, mark in zip(word, marks, strict=True)
                    if mark != "-"
                }
                marked = {letter for word, _ in clues for letter in word}
                assert not (marked - found) & set(guess.text)
            game.guess(guess.text)


def test_a_teacher_is_mediocre():
    teacher, rng = Teacher(env.answers(), wordle_policy.MEMORY), random.Random(0)
    secrets = [rng.choice(env.answers()) for _ in range(200)]
    solved = [teacher.game(secret, rng)[-1].text == secret for secret in secrets]
    assert 0.1 < sum(solved) / len(solved) < 0.3
