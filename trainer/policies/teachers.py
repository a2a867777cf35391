"""Players to learn from: they know the words and forget most of what the game has told them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

MAX_GUESSES = 6
SOLVED = "+++++"
SLIPS = 0.05  # of the guesses are misspelled

Possible = NDArray[np.intp]  # the numbers of words


@dataclass(frozen=True)
class Guess:
    """What was written, what the game said of it, and the words that it was drawn from; none for a slip."""

    text: str
    reply: str
    possible: Possible


class Teacher:
    """Guesses any word that fits the marks it remembers: of those so far each with a chance of `memory`."""

    def __init__(self, words: Sequence[str], memory: float) -> None:
        self.words = words
        self.letters = np.array([[ascii_lowercase.index(letter) for letter in word] for word in words])
        self._memory, self._known = memory, frozenset(words)
        alphabet = np.arange(len(ascii_lowercase))
        self._at = self.letters.T[None] == alphabet[:, None, None]  # [letter, place, word]
        self._has = self._at.any(1)  # [letter, word]

    def game(self, secret: str, rng: random.Random) -> list[Guess]:
        """The guesses of one game."""
        guesses: list[Guess] = []
        told: list[NDArray[np.bool_]] = []
        while len(guesses) < MAX_GUESSES and not (guesses and guesses[-1].text == secret):
            guess, possible = self._draw(told, rng)
            known = guess in self._known
            reply = observation(guess, secret, known, last=len(guesses) == MAX_GUESSES - 1)
            guesses.append(Guess(guess, reply, possible if known else possible[:0]))
            told += self._marks(guess, secret) if known else []
        return guesses

    def _draw(self, told: Sequence[NDArray[np.bool_]], rng: random.Random) -> tuple[str, Possible]:
        fits = np.ones(len(self.words), dtype=bool)
        for mark in told:
            if rng.random() < self._memory:
                fits &= mark
        possible = np.flatnonzero(fits)
        word = self.words[possible[rng.randrange(len(possible))]]
        if rng.random() < SLIPS:
            place = rng.randrange(len(word))
            word = word[:place] + rng.choice(ascii_lowercase) + word[place + 1 :]
        return word, possible

    def _marks(self, guess: str, secret: str) -> list[NDArray[np.bool_]]:
        """Which words fit each of the marks."""
        marks = list(zip(guess, feedback(guess, secret), strict=True))
        found = {letter for letter, mark in marks if mark != "-"}
        return [
            self._fits(letter, place, mark, letter in found) for place, (letter, mark) in enumerate(marks)
        ]

    def _fits(self, letter: str, place: int, mark: str, found: bool) -> NDArray[np.bool_]:
        number = ascii_lowercase.index(letter)
        at, has = self._at[number, place], self._has[number]
        if mark == "+":
            return at
        # A letter that is marked absent and was found elsewhere is absent from this place only.
        return has & ~at if mark == "?" else ~at if found else ~has


def feedback(guess: str, secret: str) -> str:
    """One mark a letter: `+` in place, `?` elsewhere (each letter of the secret once), `-` absent."""
    spare = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for letter, target in zip(guess, secret, strict=True):
        if letter == target:
            marks.append("+")
        elif spare[letter] > 0:
            spare[letter] -= 1
            marks.append("?")
        else:
            marks.append("-")
    return "".join(marks)


def observation(word: str, secret: str, known: bool, last: bool) -> str:
    """What the environment says of a guess; `known`: the word may be guessed, `last`: no guess is left."""
    marks = feedback(word, secret) if known else ""
    said = "".join(f"{letter}{i}{mark}" for i, (letter, mark) in enumerate(zip(word, marks, strict=False), 1))
    return (said or "not a word") + (" game over" if last or marks == SOLVED else "")
