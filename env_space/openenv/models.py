"""The messages of OpenEnv 0.10, as far as a Wordle game needs them, and their JSON schemas."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from env_space.messages import SEEDS
from env_space.rules import Split


class Reset(BaseModel):
    """The data of a `reset` message; without a seed the server draws one."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(None, gt=-SEEDS, lt=SEEDS)
    episode_id: str | None = Field(None, max_length=255)
    split: Split = "train"


class Action(BaseModel):
    """The data of a `step` message: a guess between square brackets, or the bare word."""

    model_config = ConfigDict(extra="forbid")

    message: str
    metadata: dict[str, Any] = {}


class Message(BaseModel):
    """Something that the player reads."""

    sender_id: int
    content: str
    category: str


class Observation(BaseModel):
    """What a player sees after a reset or a step.

    `messages` holds one message, the whole text of the game so far; `info` is the last move with its reward
    part by part. `reward` is that of the whole game so far, and exists from the first step on.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: str
    messages: list[Message]
    current_player_id: int
    legal_players: list[int]
    info: dict[str, Any]
    metadata: dict[str, Any]
    reward: float | None
    done: bool


class State(BaseModel):
    """Where the game of a connection stands. It does not tell the secret."""

    episode_id: str | None
    step_count: int
    env_id: str
    num_players: int
    max_turns: int
    turn: int
    last_reward: float
    last_info: dict[str, Any]
    raw_state: dict[str, Any]


class Schemas(BaseModel):
    """The JSON schemas of what passes over `/ws`."""

    action: dict[str, Any]
    observation: dict[str, Any]
    state: dict[str, Any]


class Metadata(BaseModel):
    """What this environment is."""

    name: str
    description: str
    version: str
    documentation_url: str


SCHEMAS = Schemas(
    action=Action.model_json_schema(),
    observation=Observation.model_json_schema(),
    state=State.model_json_schema(),
)
