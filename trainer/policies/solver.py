"""Wordle's rule and a player that always guesses a word consistent with everything it has seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_GUESSES = 6


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


class Solver:
    """Plays games over `words`, each word by its index."""

    def __init__(self, words: Sequence[str]) -> None:
        """Tabulate the feedback of every guess for every secret."""
        self._size = len(words)
        marks = [[feedback(guess, secret) for secret in words] for guess in words]
        codes = np.unique(marks, return_inverse=True)[1]
        self._codes: NDArray[np.int64] = codes.reshape(self._size, self._size)

    def game(self, secret: int, skill: float, rng: random.Random) -> list[int]:
        """Guesses of one game; each is consistent with chance `skill`, else uniform over all words."""
        guesses: list[int] = []
        possible = np.ones(self._size, dtype=bool)
        while len(guesses) < MAX_GUESSES and secret not in guesses:
            choices = np.flatnonzero(possible) if rng.random() < skill else np.arange(self._size)
            guess = int(choices[rng.randrange(len(choices))])
            guesses.append(guess)
            possible &= self._codes[guess] == self._codes[guess, secret]
        return guesses
