"""The settings of the Wordle Space."""

import re
from collections.abc import Mapping
from contextlib import suppress

from pydantic import Field, TypeAdapter, ValidationError

from space_guard.setup import HeaderText, Problems, SpaceSettings, space_owner

_BOOL = TypeAdapter(bool)  # reads a text as the fields of settings do: "true", "1", "yes" and others are true


class Settings(SpaceSettings):
    """Each field is the environment variable WORDLE_<FIELD>."""

    PREFIX = "WORDLE_"

    answers: int | None = Field(None, ge=1)  # how many words can be the secret; unset: all
    length: int = Field(5, ge=4, le=7)  # letters of a word
    hard_mode: bool = False  # a guess must use every hint
    invalid_cost: float = Field(0.05, ge=0, le=1)  # each invalid guess lowers the reward by this
    repeated_cost: float = Field(0.05, ge=0, le=1)  # each repeated guess lowers the reward by this
    max_sessions: int = Field(1024, ge=1)  # max API games in play at the same time
    session_ttl_s: float = Field(600, gt=0, allow_inf_nan=False)  # seconds without a move before expiry
    replica_url: str | None = Field(None, pattern="^https?://[^/]")  # the replica whose policy can be watched
    replica_prompt: str = Field("Play Wordle.", min_length=1)  # the prompt that the policy was trained with
    replica_key: HeaderText = Field("", repr=False)  # the key of the replica
    # If the key is empty, the API needs no key. On the Hub, the key may be empty only if `open` is true.
    key: HeaderText = Field("", repr=False)
    open: bool = False  # the API needs no key, even if `key` is set
    host: str = Field("0.0.0.0", min_length=1)  # address to listen on
    port: int = Field(8000, ge=1, le=65535)

    @classmethod
    def problems_without_key(cls, environ: Mapping[str, str]) -> Problems:
        opened = False
        with suppress(ValidationError):  # another message says that the value is wrong
            opened = _BOOL.validate_python(environ.get("WORDLE_OPEN", opened))
        return {"WORDLE_KEY": "not set"} if "SPACE_ID" in environ and not opened else {}

    @classmethod
    def notes(cls, environ: Mapping[str, str]) -> Problems:
        owner = space_owner(environ)
        url = environ.get("WORDLE_REPLICA_URL", "")
        host = re.match("https://([^/]+)[.]hf[.]space", url.lower())
        if not owner or not host or host[1].startswith(f"{owner.lower()}-"):
            return {}
        kept = "to show games of this one, set WORDLE_REPLICA_KEY to the key that its owner gave you"
        return {"WORDLE_REPLICA_URL": f"It is not a replica of {owner}: set your own, or delete it; {kept}."}

    @property
    def required_key(self) -> str:
        """The key that the API asks for, empty if the API is open."""
        return "" if self.open else self.key
