"""The settings of the Space, read once from the environment."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

PREFIX = "WORDLE_"
SENDABLE = "^[!-~]*$"  # in a header


class SettingsError(ValueError):
    """A WORDLE_ variable cannot be used; the message is a sentence that names it."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = problems  # variable -> its sentence


class Settings(BaseModel):
    """Each field is the environment variable of its name in upper case behind WORDLE_."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int | None = Field(None, ge=1, description="how many words can be the secret; unset: all")
    length: int = Field(5, ge=4, le=7, description="letters of a word")
    hard_mode: bool = Field(False, description="whether a guess must use every hint")
    invalid_cost: float = Field(0.05, ge=0, le=1, description="off the reward for each invalid guess")
    repeated_cost: float = Field(0.05, ge=0, le=1, description="off the reward for each repeated guess")
    max_sessions: int = Field(1024, ge=1, description="games in play at once")
    session_ttl_s: float = Field(
        600, gt=0, allow_inf_nan=False, description="seconds of inactivity before expiry"
    )
    replica_url: str | None = Field(None, pattern="^https?://[^/]", description="whose policy can be watched")
    replica_prompt: str = Field("Play Wordle.", min_length=1, description="what that policy was trained on")
    replica_key: str = Field("", pattern=SENDABLE, repr=False, description="that replica's key")
    key: str = Field("", pattern=SENDABLE, repr=False, description="what the API asks for; empty: it is open")
    open: bool = Field(False, description="whether the API is open although there is a key")
    host: str = Field("0.0.0.0", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")

    @property
    def asked_key(self) -> str:
        """The key that the API asks for; empty where it is open."""
        return "" if self.open else self.key


def settings_from(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`. Raises SettingsError on an unknown WORDLE_ variable or an unusable value."""
    values = {
        name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError({_variable(found): _sentence(found) for found in error.errors()}) from None


def _variable(problem: ErrorDetails) -> str:
    return PREFIX + str(problem["loc"][0]).upper()


def _sentence(problem: ErrorDetails) -> str:
    variable = _variable(problem)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(PREFIX + field.upper() for field in Settings.model_fields)
        return f"{variable} is not a setting; the settings are {known}."
    if variable.endswith("KEY"):
        return f"{variable} cannot be sent in a header; use printable ASCII without spaces."
    return f"{variable}={problem['input']} cannot be used: {problem['msg'].lower()}."
