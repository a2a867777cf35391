"""What the trainer's requests to its Spaces carry: their key, and to private ones a token that can only read.

The variable `SPACES` says which Spaces are its own; whoever is not named there is sent neither. All of it
comes from the environment, so that a rollout worker in its own process sends the same. No secret is ever
part of a URL, an option or a log line, and none goes where a redirect leads.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
from collections.abc import AsyncIterator, Iterable

import aiohttp
from huggingface_hub import get_token

KEY_HEADER = "X-Space-Key"
OWN = "SPACES"  # URLs, parted by spaces
_SENDABLE = re.compile(r"[!-~]*")
# Nothing that two programs could read in two ways: no user, no backslash, no host that ends in a dot.
_URL = re.compile(r"(?a)(https?)://([\w.-]*\w|\[[\da-f:]+\])(?::(\d+))?(?:/.*)?", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]  # scheme, host, port


def headers(url: str) -> dict[str, str]:
    """The headers for requests to a replica or an environment at `url`; none unless `SPACES` names it.

    `SPACE_KEY` goes to all of those. `SPACE_HF_TOKEN`, which opens private Spaces, goes to those on the Hub;
    `HF_TOKEN`, which may write, to none. Raises `ValueError` for a value that cannot be sent.
    """
    if not is_own(url):
        return {}
    wanted = {KEY_HEADER: _read("SPACE_KEY")}
    if _on_the_hub(url) and (token := _reading_token()):
        wanted["Authorization"] = f"Bearer {token}"
    return {name: value for name, value in wanted.items() if value}


def env_headers(url: str) -> dict[str, str]:
    """As `headers`, for the environment: one that is somebody else's is sent `ENV_KEY` and nothing else."""
    if is_own(url):
        return headers(url)
    key = _read("ENV_KEY")
    return {KEY_HEADER: key} if key else {}


def is_own(url: str) -> bool:
    """Whether `SPACES` names the server at `url`."""
    origin = _origin(url)
    return origin is not None and origin in map(_origin, os.environ.get(OWN, "").split())


def own(urls: Iterable[str]) -> None:
    """From now on take the servers at `urls`, and no others, for the trainer's own."""
    os.environ[OWN] = " ".join(urls)


_shared: contextvars.ContextVar[aiohttp.ClientSession] = contextvars.ContextVar("shared")


def share(session: aiohttp.ClientSession) -> None:
    """Let `connections` give out `session` in this task and in those that it starts."""
    _shared.set(session)


@contextlib.asynccontextmanager
async def connections() -> AsyncIterator[aiohttp.ClientSession]:
    """The connections that were shared with this task; without any, new ones, closed after the block."""
    if shared := _shared.get(None):
        yield shared
    else:
        async with aiohttp.ClientSession() as session:
            yield session


@functools.cache
def _origin(url: str) -> Origin | None:
    """Whom a request to `url` reaches; None for what is no plain URL."""
    if not (match := _URL.fullmatch(url)):
        return None
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    return scheme, host, int(port) if port else _PORTS[scheme]


def _on_the_hub(url: str) -> bool:
    origin = _origin(url)
    return origin is not None and origin[1].endswith(".hf.space") and (origin[0], origin[2]) == ("https", 443)


def _reading_token() -> str:
    token = _read("SPACE_HF_TOKEN")
    if token and token == get_token():
        raise ValueError("SPACE_HF_TOKEN is HF_TOKEN, which may write: set it to a token of the type Read")
    return token


def _read(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not _SENDABLE.fullmatch(value):
        raise ValueError(f"{variable} cannot be sent in a header: set it to printable ASCII without spaces")
    return value
