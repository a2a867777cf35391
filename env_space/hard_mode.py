"""Hard mode: a guess must use every hint that the guesses before it revealed."""

from collections import Counter
from collections.abc import Iterable

from env_space.rewards import GREEN, GREY


def ignored_hint(word: str, clues: Iterable[tuple[str, str]]) -> str:
    """A sentence that names a hint which `word` ignores; empty if it uses all.

    `clues` are the valid guesses so far with their marks. Greens must stay where they are, and every letter
    must come back as often as a guess has shown it to be in the secret.
    """
    for guess, marks in clues:
        for place, (letter, mark) in enumerate(zip(guess, marks, strict=True)):
            if mark == GREEN and word[place] != letter:
                return f"Hard mode: letter {place + 1} of a guess must be '{letter}', as '{guess}' showed."
        found = Counter(letter for letter, mark in zip(guess, marks, strict=True) if mark != GREY)
        for letter, times in found.items():
            if word.count(letter) < times:
                often = f" {times} times" if times > 1 else ""
                return f"Hard mode: a guess must contain '{letter}'{often}, as '{guess}' showed."
    return ""
