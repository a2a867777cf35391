"""What the trainer's requests to a Space carry: the deployment's key, and to private Spaces the Hub's token.

Both come from the environment, so that a rollout worker in its own process sends the same; neither is ever
part of a URL, an option or a log line.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp

KEY_HEADER = "X-Space-Key"
_SENDABLE = re.compile(r"[!-~]*")


def headers(url: str) -> dict[str, str]:
    """The headers for requests to a replica or an environment at `url`; pass them on to no other host.

    `SPACE_KEY` goes to every Space of a deployment. `HF_TOKEN` opens private Spaces and goes only to hosts
    below `.hf.space`, over https. Raises `ValueError` for a value that no header can hold.
    """
    wanted = {KEY_HEADER: _read("SPACE_KEY")}
    if _on_the_hub(url) and (token := _read("HF_TOKEN")):
        wanted["Authorization"] = f"Bearer {token}"
    return {name: value for name, value in wanted.items() if value}


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


def _on_the_hub(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and (parts.hostname or "").endswith(".hf.space")


def _read(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not _SENDABLE.fullmatch(value):
        raise ValueError(f"{variable} cannot be sent in a header: set it to printable ASCII without spaces")
    return value
