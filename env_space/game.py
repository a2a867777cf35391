"""Wordle in plain Python: the words, the feedback, the rules, a game and its reward."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from env_space.settings import Settings
from space_guard.setup import SettingsError

LENGTH = 5
MAX_GUESSES = 6
MAX_STORED = 32  # a guess is cut to this many characters before it is stored: a policy may write a long text
MAX_SEED = 2**53  # all languages can read integers below this exactly from JSON
HELD_OUT = 10  # one answer in this many is never used in training

# the reward for solving, and for each unused guess
SOLVED = 1.0
EARLY = 0.05
LETTERS = 0.2  # the reward if all letters of the best guess are green; a yellow earns half of a green
GAVE_UP = 0.2  # subtracted from the reward of a game that the player gives up

GREEN = "+"
YELLOW = "?"
GREY = "-"
OPENING = "Play Wordle."
NOT_A_WORD = "not a word"
GAME_OVER = " game over"

Split = Literal["train", "held_out"]
DEFAULTS = Settings.read({})


class GameError(HTTPException):
    """A request cannot be served. `detail` is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class RewardParts:
    """The reward of a game so far, in parts."""

    solved: float
    greens: float
    yellows: float
    repetition: float
    invalid: float
    gave_up: float

    @property
    def total(self) -> float:
        return self.solved + self.greens + self.yellows + self.repetition + self.invalid + self.gave_up


@dataclass(frozen=True, slots=True)
class Move:
    """The result of one turn.

    Attributes:
        word: The guess in lower case, cut to `MAX_STORED` characters.
        observation: The feedback as a short text for the policy.
        feedback: One mark per letter, empty for an invalid word.
        message: A sentence if the word was invalid or repeated, else empty.
        reward: The reward of the game so far: the sum of `reward_parts`.
        secret: Empty until the game is over.
    """

    turn: int
    word: str
    observation: str
    feedback: str
    message: str
    valid: bool
    done: bool
    solved: bool
    reward: float
    reward_parts: RewardParts
    secret: str


MOVE = TypeAdapter(Move)


def feedback(guess: str, secret: str) -> str:
    """Mark each letter of `guess`: '+' in place, '?' elsewhere, '-' absent.

    If the secret has a letter n times, at most n places of the guess with this letter get '+' or '?': first
    the places where the letter is right, then the others from left to right. All further places get '-'.
    """
    unmatched = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            marks.append(GREEN)
        elif unmatched[g]:
            unmatched[g] -= 1
            marks.append(YELLOW)
        else:
            marks.append(GREY)
    return "".join(marks)


def render(guess: str, marks: str) -> str:
    """Write the letter, number and mark of each place: ('crane', '-?+--') gives 'c1-r2?a3+n4-e5-'."""
    return "".join(f"{letter}{i}{mark}" for i, (letter, mark) in enumerate(zip(guess, marks, strict=True), 1))


@cache
def guesses(length: int = LENGTH) -> frozenset[str]:
    """All words of `length` letters that may be guessed, including the answers."""
    return frozenset(_read(f"guesses-{length}.txt"))


def answers(n: int | None = None, length: int = LENGTH) -> tuple[str, ...]:
    """The first `n` answers (None: all) of `length` letters, in the order of the words' sha256. Raises
    SettingsError if there are fewer answers."""
    words = sorted(_read(f"answers-{length}.txt"), key=lambda word: sha256(word.encode()).digest())
    if n is not None and n > len(words):
        raise SettingsError({"WORDLE_ANSWERS": f"there are only {len(words)} answers of {length} letters"})
    return tuple(words[:n])


def secret_for(seed: int, words: Sequence[str]) -> str:
    """The secret that `seed` selects from `words`, the same in every process."""
    return words[int(sha256(str(seed).encode()).hexdigest(), 16) % len(words)]


def ignored_hint(word: str, clues: Iterable[tuple[str, str]]) -> str:
    """Return a sentence that names a hint which `word` ignores in hard mode; empty if `word` uses all hints.

    `clues` are the valid guesses so far with their marks. Greens must stay in place. If a guess has shown
    that a letter occurs n times in the secret, `word` must contain this letter at least n times.
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


def quote(word: str) -> str:
    return repr(word if len(word) <= 20 else word[:20] + "...")


class Game:
    """A game: six guesses at one secret. Every guess costs a turn; only valid guesses earn a reward."""

    def __init__(self, secret: str, valid: Collection[str], settings: Settings = DEFAULTS) -> None:
        self.secret = secret
        self.moves: list[Move] = []
        self.solved = self.gave_up = False
        self.turns = self.invalid = self.repeated = 0  # number of guesses: all, invalid, and repeated ones
        self._closest = (0, 0)  # greens and yellows of the best guess
        self._valid = valid
        self._settings = settings

    @property
    def over(self) -> bool:
        return self.solved or self.gave_up or self.turns == MAX_GUESSES

    def guess(self, word: str) -> Move:
        """Play one turn. Upper case counts as lower case. Raises GameError if the game is over."""
        if self.over:
            raise GameError(409, f"The game ended after turn {self.turns}; start a new one to guess again.")
        word = word.lower()
        self.turns += 1
        invalid = self._invalid_reason(word)
        marks = "" if invalid else feedback(word, self.secret)
        first = None if invalid else next((move.turn for move in self.moves if move.word == word), None)
        repetition = f"'{word}' was already guessed in turn {first}." if first else ""
        self.solved = marks == GREEN * len(self.secret)
        self.invalid += bool(invalid)
        self.repeated += bool(repetition)
        letters = marks.count(GREEN), marks.count(YELLOW)
        self._closest = max(self._closest, letters, key=lambda found: (2 * found[0] + found[1], found[0]))
        parts = self.reward_parts()
        move = Move(
            turn=self.turns,
            word=word[:MAX_STORED],
            observation=(render(word, marks) if marks else NOT_A_WORD) + (GAME_OVER if self.over else ""),
            feedback=marks,
            message=invalid or repetition,
            valid=bool(marks),
            done=self.over,
            solved=self.solved,
            reward=parts.total,
            reward_parts=parts,
            secret=self.secret if self.over else "",
        )
        self.moves.append(move)
        return move

    def give_up(self) -> None:
        """End the game now. A game that is over does not change."""
        self.gave_up = self.gave_up or not self.over

    def reward_parts(self) -> RewardParts:
        greens, yellows = self._closest
        # Subtract from 0.0 instead of negating: without a cost the result is then 0.0, not -0.0.
        return RewardParts(
            solved=SOLVED + EARLY * (MAX_GUESSES - self.turns) if self.solved else 0.0,
            greens=LETTERS * greens / len(self.secret),
            yellows=LETTERS * yellows / 2 / len(self.secret),
            repetition=0.0 - self._settings.repeated_cost * self.repeated,
            invalid=0.0 - self._settings.invalid_cost * self.invalid,
            gave_up=-GAVE_UP if self.gave_up else 0.0,
        )

    def _invalid_reason(self, word: str) -> str:
        """A sentence that says why `word` is invalid; empty if it is valid."""
        if word in self._valid:
            clues = ((move.word, move.feedback) for move in self.moves if move.valid)
            return ignored_hint(word, clues) if self._settings.hard_mode else ""
        if not (word.isascii() and word.isalpha()):
            return f"{quote(word)} has characters other than the letters a to z."
        if len(word) != len(self.secret):
            return f"{quote(word)} has {len(word)} letters; a guess must have {len(self.secret)}."
        return f"{quote(word)} is not in the word list."


class Rules:
    """The words and settings of all games. Raises SettingsError if `settings.answers` is too high."""

    def __init__(self, settings: Settings) -> None:
        words = answers(settings.answers, settings.length)
        trained = len(words) - len(words) // HELD_OUT
        self.train = words[:trained]
        self.held_out = words[trained:]
        self.settings = settings

    def deal(self, seed: int, split: Split = "train") -> Game:
        """Start the game whose secret `seed` selects. Raises GameError if `split` has no words."""
        words = self.train if split == "train" else self.held_out
        if not words:
            without = f"Of {len(self.train)} answers, none is held out"
            raise GameError(422, f"{without}: set WORDLE_ANSWERS to at least {HELD_OUT}.")
        return Game(secret_for(seed, words), guesses(self.settings.length), self.settings)


def _read(name: str) -> list[str]:
    return (Path(__file__).parent / "words" / name).read_text("ascii").split()
