"""Settings from environment variables: one frozen object, read once; an unknown variable is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError

__all__ = ["HeaderText", "Problems", "SettingsError", "key_problem", "listen_address", "read_settings"]

Problems = Mapping[str, str]  # variable or secret -> what is wrong with it
MIN_KEY_LENGTH = 16
Kind = TypeVar("Kind", bound=BaseModel)


class SettingsError(ValueError):
    """Environment variables cannot be used; `problems` says what is wrong with each."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(f"set these variables: {listed(problems)}")
        self.problems = dict(problems)


def listed(problems: Problems) -> str:
    """All problems in one line."""
    return "; ".join(f"{name}: {what}" for name, what in problems.items())


def _header_text(text: str) -> str:
    if not re.fullmatch("[!-~]*", text):
        raise ValueError("a header cannot hold it, use printable ASCII without spaces")
    return text


HeaderText = Annotated[str, AfterValidator(_header_text)]


def read_settings(kind: type[Kind], prefix: str, environ: Mapping[str, str]) -> Kind:
    """The settings of a Space: a frozen model, of which each field is the variable `prefix` + its name.

    Raises:
        SettingsError: A variable is missing, unknown or has an unusable value.
    """
    own = {name.removeprefix(prefix).lower(): environ[name] for name in environ if name.startswith(prefix)}
    try:
        return kind.model_validate(own)
    except ValidationError as error:
        known = ", ".join(prefix + field.upper() for field in kind.model_fields)
        words = {
            "missing": "not set",
            "extra_forbidden": f"there is no such variable; the variables are {known}",
        }
        problems = {  # without the values, which may be secrets
            f"{prefix}{found['loc'][0]}".upper(): words.get(
                found["type"], found["msg"].removeprefix("Value error, ").lower()
            )
            for found in error.errors()
        }
        raise SettingsError(problems) from None


def key_problem(environ: Mapping[str, str], key: str, opening: str) -> dict[str, str]:
    """What is wrong with the variable `key` of a Space on the Hub, if anything.

    A Space needs a key that cannot be guessed, or the variable `opening` set to true.
    """
    value = environ.get(key, "")
    if not value and environ.get(opening, "").lower() != "true":
        return {key: "not set"}
    if 0 < len(value) < MIN_KEY_LENGTH:
        return {key: f"shorter than {MIN_KEY_LENGTH} characters, so it could be guessed"}
    return {}


def listen_address(kind: type[BaseModel], prefix: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port to listen on although the settings as a whole cannot be used."""
    default, port = kind.model_fields, environ.get(f"{prefix}PORT", "")
    return (
        environ.get(f"{prefix}HOST", default["host"].default),
        int(port) if port.isdecimal() else default["port"].default,
    )
