"""The bodies of the HTTP API; `Move` and `RewardParts` are the game's own."""

from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from env_space.game import Move, RewardParts, Split

MOVE = TypeAdapter(Move)
MAX_SEED = 2**53  # integers below are exact in every language's JSON

# In JSON, 3.0 and 3 are the same number.
_INTEGER = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)


class Opening(BaseModel):
    """A request for a game. Sent again with the same `id` and seed, it finds the game it opened."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Annotated[int, Field(gt=-MAX_SEED, lt=MAX_SEED, description="selects the secret"), _INTEGER]
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
    turn: Annotated[int, Field(ge=1, lt=2**31, description="1 for the first move"), _INTEGER]


class Closed(BaseModel):
    """How a game ended."""

    solved: bool
    turns: int
    reward: float
    reward_parts: RewardParts
    secret: str


class Words(BaseModel):
    """Every possible secret, the ones that no training game has, and the size of a game."""

    answers: tuple[str, ...]
    held_out: tuple[str, ...]
    length: int
    max_guesses: int


class Health(BaseModel):
    """Whether the service is up, and how full it is."""

    status: str
    sessions: int
    max_sessions: int


class Problem(BaseModel):
    """Why a request was refused, and how to fix it."""

    detail: str


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The statuses with which a route may refuse, for the API's description."""
    return {status: {"model": Problem} for status in statuses}
