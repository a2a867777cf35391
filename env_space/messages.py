"""What the service reads and answers, apart from `Move` and `RewardParts`, which are the game's own."""

from typing import Annotated
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from env_space.wordle import RewardParts


def _writable(text: str) -> str:
    # JSON can spell half of a surrogate pair, which no answer could repeat in UTF-8.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("half of a surrogate pair is not a character")
    return text


class Opening(BaseModel):
    """A request for a game. Sent again with the same `id` and seed, it finds the game it opened."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, description="names the secret")]
    id: Annotated[UUID | None, Field(strict=False, description="of your choice; makes a retry safe")] = None


class Opened(BaseModel):
    """A game that waits for its first guess."""

    session: UUID
    observation: str
    max_guesses: int


class Guess(BaseModel):
    """Move number `turn` of a game. Sent again, it is played once and answered the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    word: Annotated[str, AfterValidator(_writable)]
    turn: Annotated[int, Field(ge=1, lt=2**31, description="1 for the first move")]


class Closed(BaseModel):
    """How a game ended."""

    solved: bool
    turns: int
    reward: float
    reward_parts: RewardParts


class Words(BaseModel):
    """Every possible secret, and the frame of a game."""

    answers: tuple[str, ...]
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
