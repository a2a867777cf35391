"""Another implementation of the feedback: for all pairs at the same time, by counting letters."""

from __future__ import annotations

import numpy as np

from env_space.game import feedback

NONE, ELSEWHERE, IN_PLACE = range(3)
MARKS = "-?+"


def all_feedback(guesses: list[str], secrets: list[str]) -> np.ndarray:
    """The mark of each letter, uint8 [guesses, secrets, letters].

    A letter that is not in place is elsewhere if fewer copies of it that are not in place stand to its left
    in the guess than the secret has copies of it where the guess has something else.
    """
    guess, secret = _letters(guesses)[:, None, :], _letters(secrets)[None, :, :]
    in_place = guess == secret
    marks = np.where(in_place, IN_PLACE, NONE).astype(np.uint8)
    for i in range(guess.shape[-1]):
        letter = guess[:, :, i, None]
        wanted = ((secret == letter) & ~in_place).sum(-1)
        before = ((guess[:, :, :i] == letter) & ~in_place[:, :, :i]).sum(-1)
        marks[:, :, i][(before < wanted) & ~in_place[:, :, i]] = ELSEWHERE
    return marks


def differences(guesses: list[str], secrets: list[str]) -> list[tuple[str, str]]:
    """The pairs for which the engine's feedback is not the reference's."""
    found = []
    for guess in guesses:
        marks = np.array(list(MARKS))[all_feedback([guess], secrets)[0]]
        expected = marks.view(f"U{marks.shape[-1]}")[:, 0].tolist()
        found += [
            (guess, secret)
            for secret, mark in zip(secrets, expected, strict=True)
            if feedback(guess, secret) != mark
        ]
    return found


def _letters(words: list[str]) -> np.ndarray:
    return np.array([list(word.encode()) for word in words], dtype=np.uint8)
