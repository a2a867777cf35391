"""Wordle in plain Python: the words, the feedback and one game."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from env_space.hard_mode import ignored_hint
from env_space.rewards import GREEN, GREY, USUAL_COSTS, YELLOW, Costs, RewardParts, Tally

LENGTH = 5
MAX_GUESSES = 6
KEPT = 32  # characters of a guess; a policy may write a novel, and a thousand games keep six each

OPENING = "Play Wordle."
NOT_A_WORD = "not a word"
GAME_OVER = " game over"


class GameOverError(Exception):
    """A guess came after the end of the game; the message is a sentence for the player."""


@dataclass(frozen=True, slots=True)
class Move:
    """One played turn.

    `word` is the guess in lower case, cut to `KEPT` characters; `observation` is the compact text for the
    policy; `feedback` has a mark per letter, none for an invalid word; `message` is a sentence if the word
    was invalid or repeated, else empty; `reward` and `reward_parts` are what the whole game has earned up to
    here; `secret` is empty until the game is over.
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


def feedback(guess: str, secret: str) -> str:
    """Mark each letter of `guess`: '+' in place, '?' elsewhere, '-' absent.

    A letter earns as many marks as the secret holds of it: greens first, then yellows from the left.
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
    """Letter, position and mark in turn: ('crane', '-?+--') gives 'c1-r2?a3+n4-e5-'."""
    return "".join(f"{letter}{i}{mark}" for i, (letter, mark) in enumerate(zip(guess, marks, strict=True), 1))


@cache
def guesses(length: int = LENGTH) -> frozenset[str]:
    """Every word of `length` letters that may be guessed; holds every answer."""
    return frozenset(_read(f"guesses-{length}.txt"))


def answers(n: int | None = None, length: int = LENGTH) -> tuple[str, ...]:
    """The first `n` answers (None: all) of `length` letters, in the order of the sha256 of the word.

    The order looks random and is the same in every language and process. Raises ValueError for an `n`
    below 1 or above all.
    """
    words = sorted(_read(f"answers-{length}.txt"), key=lambda word: sha256(word.encode()).digest())
    if n is not None and not 1 <= n <= len(words):
        raise ValueError(f"There are {len(words)} answers; ask for 1 to {len(words)} of them, not {n}.")
    return tuple(words[:n])


def secret_for(seed: int, words: Sequence[str]) -> str:
    """The secret that `seed` names among `words`; the same in every process."""
    return words[int(sha256(str(seed).encode()).hexdigest(), 16) % len(words)]


class Game:
    """Six guesses at one secret. Every guess costs a turn; only valid ones earn letter credit."""

    def __init__(
        self, secret: str, valid: Collection[str], costs: Costs = USUAL_COSTS, hard_mode: bool = False
    ) -> None:
        self.secret = secret
        self.moves: list[Move] = []
        self.solved = False
        self.gave_up = False
        self.tally = Tally(len(secret), costs)
        self._valid = valid
        self._hard_mode = hard_mode

    @property
    def turns(self) -> int:
        """How many guesses were played."""
        return len(self.moves)

    @property
    def over(self) -> bool:
        """Whether no guess can follow: solved, out of turns or given up."""
        return self.solved or self.gave_up or self.turns == MAX_GUESSES

    def guess(self, word: str) -> Move:
        """Play one turn; upper case is read as lower case. Raises GameOverError after the end."""
        if self.over:
            raise GameOverError(f"The game ended after turn {self.turns}; start a new one to guess again.")
        word = word.lower()
        problem = invalid_reason(word, len(self.secret), self._valid) or self._ignored_hint(word)
        marks = "" if problem else feedback(word, self.secret)
        repetition = "" if problem else self._repetition(word)
        self.solved = marks == GREEN * len(self.secret)
        self.tally.count(marks, bool(repetition))
        move = self._describe(kept(word), marks, problem or repetition)
        self.moves.append(move)
        return move

    def give_up(self) -> None:
        """End the game where it stands; a game that is over keeps its result."""
        self.gave_up = self.gave_up or not self.over

    def reward_parts(self) -> RewardParts:
        """What the game has earned so far."""
        return self._parts(self.turns)

    def _parts(self, turns: int) -> RewardParts:
        return self.tally.parts(MAX_GUESSES - turns if self.solved else None, self.gave_up)

    def _describe(self, word: str, marks: str, message: str) -> Move:
        turn = self.turns + 1
        over = self.solved or turn == MAX_GUESSES
        parts = self._parts(turn)
        return Move(
            turn=turn,
            word=word,
            observation=(render(word, marks) if marks else NOT_A_WORD) + (GAME_OVER if over else ""),
            feedback=marks,
            message=message,
            valid=bool(marks),
            done=over,
            solved=self.solved,
            reward=parts.total,
            reward_parts=parts,
            secret=self.secret if over else "",
        )

    def _ignored_hint(self, word: str) -> str:
        if not self._hard_mode:
            return ""
        return ignored_hint(word, ((move.word, move.feedback) for move in self.moves if move.valid))

    def _repetition(self, word: str) -> str:
        turn = next((move.turn for move in self.moves if move.word == word), None)
        return f"'{word}' was already guessed in turn {turn}." if turn else ""


def kept(word: str) -> str:
    """What a game keeps of `word`: enough to tell guesses apart and to name them."""
    return word.lower()[:KEPT]


def invalid_reason(word: str, length: int, valid: Collection[str]) -> str:
    """A sentence that says why `word` cannot be guessed; empty if it can."""
    if word in valid:
        return ""
    shown = quote(word)
    if not (word.isascii() and word.isalpha()):
        return f"{shown} is not made of the letters a to z."
    if len(word) != length:
        return f"{shown} has {len(word)} letters; a guess has {length}."
    return f"{shown} is not in the word list."


def quote(word: str) -> str:
    """`word` in quotes for a sentence, cut short if somebody sent a novel."""
    return repr(word if len(word) <= 20 else word[:20] + "...")


def _read(name: str) -> list[str]:
    return (Path(__file__).parent / "words" / name).read_text("ascii").split()
