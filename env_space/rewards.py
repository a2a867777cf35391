"""What a game earns, part by part, so that a trainer can use the sum or put parts of it together itself."""

from dataclasses import dataclass

GREEN, YELLOW, GREY = "+", "?", "-"

SOLVED, EARLY = 1.0, 0.05  # for solving, and for each guess left over
LETTERS = 0.2  # for all letters of the closest guess; a yellow counts half a green
GAVE_UP = 0.2


@dataclass(frozen=True, slots=True)
class Costs:
    """What one wasted guess takes off the reward."""

    invalid: float = 0.05
    repeated: float = 0.05


USUAL_COSTS = Costs()


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What a game has earned so far; the reward is the sum of the parts."""

    solved: float = 0.0
    greens: float = 0.0
    yellows: float = 0.0
    repetition: float = 0.0
    invalid: float = 0.0
    gave_up: float = 0.0

    @property
    def total(self) -> float:
        """The reward: the sum of the parts."""
        return self.solved + self.greens + self.yellows + self.repetition + self.invalid + self.gave_up


class Tally:
    """Counts the guesses of one game. Letters are those of the closest guess, so a wasted one adds none."""

    def __init__(self, length: int, costs: Costs) -> None:
        self.invalid = 0
        self.repeated = 0
        self._length = length
        self._costs = costs
        self._closest = (0, 0)  # greens and yellows

    def count(self, marks: str, repeated: bool) -> None:
        """Take in one guess; `marks` is empty for an invalid one, which `repeated` is never said of."""
        self.invalid += not marks
        self.repeated += repeated
        letters = marks.count(GREEN), marks.count(YELLOW)
        self._closest = max(self._closest, letters, key=lambda found: (2 * found[0] + found[1], found[0]))

    def parts(self, left_over: int | None, gave_up: bool) -> RewardParts:
        """The parts; `left_over` counts the unused guesses of a solved game; None if not solved."""
        greens, yellows = self._closest
        # "0.0 -" and not a sign: what was not wasted costs 0, and not -0.
        return RewardParts(
            solved=0.0 if left_over is None else SOLVED + EARLY * left_over,
            greens=LETTERS * greens / self._length,
            yellows=LETTERS * yellows / 2 / self._length,
            repetition=0.0 - self._costs.repeated * self.repeated,
            invalid=0.0 - self._costs.invalid * self.invalid,
            gave_up=-GAVE_UP if gave_up else 0.0,
        )
