"""What the service reads and answers, over plain HTTP; `Move` and `RewardParts` are the game's own."""

from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from env_space.rewards import RewardParts
from env_space.rules import Split
from env_space.wordle import Move

MOVE = TypeAdapter(Move)
SEEDS = 2**53  # whole numbers up to here are exact in every language's JSON


def _whole(value: Any) -> Any:
    # To JSON, 3.0 is as good an integer as 3.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)


class Opening(BaseModel):
    """A request for a game. Sent again with the same `id` and seed, it finds the game it opened."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Annotated[int, Field(gt=-SEEDS, lt=SEEDS, description="names the secret"), _WHOLE]
    split: Annotated[Split, Field(description="train, or the tenth of the words held out of it")] = "train"
    id: Annotated[UUID | None, Field(strict=False, description="of your choice; makes a retry safe")] = None


class Opened(BaseModel):
    """A game that waits for its first guess."""

    session: UUID
    observation: str
    max_guesses: int
    length: int
    hard_mode: bool


class Guess(BaseModel):
    """Move number `turn` of a game. Sent again, it is played once and answered the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    word: str
    turn: Annotated[int, Field(ge=1, lt=2**31, description="1 for the first move"), _WHOLE]


class Closed(BaseModel):
    """How a game ended."""

    solved: bool
    turns: int
    reward: float
    reward_parts: RewardParts
    secret: str


class Words(BaseModel):
    """Every possible secret, those of them that no training game has, and the frame of a game."""

    answers: tuple[str, ...]
    held_out: tuple[str, ...]
    length: int
    max_guesses: int


class Health(BaseModel):
    """The service answers, and how full it is."""

    status: str
    sessions: int
    max_sessions: int


class Problem(BaseModel):
    """Why the request was refused, and what to do instead."""

    detail: str
