"""What all games of one service have in common, and the split of the secrets into train and held-out."""

from dataclasses import dataclass
from typing import Literal

from env_space.rewards import Costs
from env_space.settings import Settings
from env_space.wordle import Game, answers, guesses, secret_for

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 10  # one answer in so many, rounded down


class SplitError(ValueError):
    """No secret can be drawn from the split; the message is a sentence for the client."""


@dataclass(frozen=True)
class Rules:
    """The words, the costs and the mode of every game. No secret of a training game is among `held_out`."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    length: int
    costs: Costs
    hard_mode: bool

    def deal(self, seed: int, split: Split = "train") -> Game:
        """The game whose secret `seed` names. Raises SplitError if `split` has no words."""
        words = self.train if split == "train" else self.held_out
        if not words:
            raise SplitError(
                f"No answer is held out of {len(self.train)}; WORDLE_ANSWERS={HELD_OUT_SHARE} holds out one."
            )
        return Game(secret_for(seed, words), guesses(self.length), self.costs, self.hard_mode)


def rules_from(settings: Settings) -> Rules:
    """The rules that `settings` ask for. Raises ValueError if there are not so many answers."""
    words = answers(settings.answers, settings.length)
    trained = len(words) - len(words) // HELD_OUT_SHARE
    return Rules(
        train=words[:trained],
        held_out=words[trained:],
        length=settings.length,
        costs=Costs(settings.invalid_cost, settings.repeated_cost),
        hard_mode=settings.hard_mode,
    )
