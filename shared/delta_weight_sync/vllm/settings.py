"""What a vLLM that follows is told by its environment: one frozen object, read once."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.protocol import POLL_S
from delta_weight_sync.signing import PublicKeys

PREFIX = "DELTA_WEIGHT_SYNC_"
NOT_HERE = "the trainer's alone: unset it here, a replica needs the public half only"
Kind = TypeVar("Kind", bound=BaseModel)


class SettingsError(DeltaWeightSyncError, ValueError):
    """The environment does not describe a replica; the message names each variable and the fix."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("set these variables: " + "; ".join(f"{k}: {v}" for k, v in problems.items()))
        self.problems = problems  # variable -> what is wrong with it


class Settings(BaseModel):
    """Each field is the variable `DELTA_WEIGHT_SYNC_<FIELD>`; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str  # hf://buckets/<owner>/<name>#<run>; without #<run> the only run of the bucket
    name: str = Field(default_factory=socket.gethostname)  # how the dashboard calls this replica
    key: str = Field("", repr=False)  # opens the routes that control the follower; without it there are none
    public_key: str = ""  # versions that it has not signed are refused; see `signing`
    signing_key: str = Field("", repr=False)  # never: named here to say so
    poll_s: float = Field(POLL_S, gt=0)  # how often HEAD is looked at
    folder: str = ""  # scratch space for a checkpoint or two; empty: a temporary one

    @field_validator("key")
    @classmethod
    def _sendable(cls, key: str) -> str:
        return sendable(key)

    @field_validator("public_key")
    @classmethod
    def _parsed(cls, text: str) -> str:
        PublicKeys(text)
        return text

    @field_validator("signing_key")
    @classmethod
    def _absent(cls, text: str) -> str:
        if text:
            raise ValueError(NOT_HERE)
        return text


def sendable(key: str) -> str:
    """The key, if a header can hold it; else `ValueError`."""
    if not re.fullmatch("[!-~]*", key):
        raise ValueError("a header cannot hold it, use printable ASCII without spaces")
    return key


def settings_from(kind: type[Kind], prefix: str, environ: Mapping[str, str]) -> Kind:
    """Settings of a `kind` from the variables that begin with `prefix`; raises `SettingsError`."""
    values = {key[len(prefix) :].lower(): value for key, value in environ.items() if key.startswith(prefix)}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError(
            {f"{prefix}{str(e['loc'][0]).upper()}": _in_words(e) for e in error.errors()}
        ) from None


def _in_words(problem: ErrorDetails) -> str:
    """What is wrong, without the value: it may be a secret."""
    words = {"missing": "not set", "extra_forbidden": "there is no such variable"}
    return words.get(problem["type"], problem["msg"].removeprefix("Value error, ").lower())
