"""Spaces that sleep, build or load, as the trainer meets them: it waits and says for what.

What no waiting mends - a wrong URL, a token that may not read, a wrong key - ends the run at once with a
sentence. To ask a sleeping Space anything wakes it, so the trainer asks all before it uploads version 0.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import httpx

from trainer import space_access

Kind = Literal["replica", "env"]

PATIENCE_S = 1800.0  # a paid Space takes minutes to wake and to load a model
WAITING = "waiting for the run's first version"  # a replica's state before a trainer ever ran
NOT_SET_UP = "not set up"  # of both: a variable or a secret is missing
_OPTION: dict[Kind, str] = {"replica": "--replicas", "env": "--env_url"}
_READING: dict[Kind, str] = {"replica": "/ready", "env": "/health"}
_READY: dict[Kind, str] = {"replica": "serving", "env": "healthy"}
_HEADERS = {"replica": space_access.headers, "env": space_access.env_headers}
_READABLE = "set SPACE_HF_TOKEN to a token that may read it, and name it in SPACES"


class SpacesUnavailableError(RuntimeError):
    """A Space did not get ready in time, or never will; the message names it and the fix."""


@dataclass(frozen=True)
class Answer:
    """What a Space says it is doing; `up` is whether the app itself answered, not the Hub in its place."""

    state: str
    up: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return self.state + (f" ({self.error})" if self.error else "")


class ColdSpaces:
    """The Spaces of one run, which may all be asleep."""

    def __init__(
        self, replicas: Sequence[str], env_url: str = "", *, say: Callable[[str], None] = print
    ) -> None:
        self._spaces: list[tuple[str, Kind]] = [(url, "replica") for url in replicas]
        self._spaces += [(env_url, "env")] if env_url else []
        self._say = say
        self._trusted: set[tuple[str, Kind]] = set()  # they took the key

    def knock(self) -> None:
        """Ask each once, which wakes it; raises `SpacesUnavailableError` for what no waiting mends."""
        for space in self._spaces:
            self._look(*space)

    def wait(self, poll_s: float = 1.0) -> None:
        """Block until the environment and one replica are ready, saying what each of them waits for.

        Raises `SpacesUnavailableError` if that takes longer than half an hour, or will never be.
        """
        deadline, said = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < deadline:
            answers = [self._look(*space) for space in self._spaces]
            if self._ready(answers):
                return
            news = "; ".join(
                f"{url}: {answer}" for (url, _), answer in zip(self._spaces, answers, strict=True)
            )
            if news != said:
                self._say(f"waiting for the Spaces - {news}")
                said = news
            time.sleep(poll_s)
        raise SpacesUnavailableError(f"not ready within {PATIENCE_S:.0f} s: {said}")

    def _look(self, url: str, kind: Kind) -> Answer:
        answer = look(url, kind)
        if answer.up and (url, kind) not in self._trusted:
            check_key(url, kind)
            self._trusted.add((url, kind))
        return answer

    def _ready(self, answers: Sequence[Answer]) -> bool:
        """One replica is enough, but there is only one environment."""
        kinds = [kind for _, kind in self._spaces]
        ready = [answer.state == _READY[kind] for answer, kind in zip(answers, kinds, strict=True)]
        found = {kind for kind, is_ready in zip(kinds, ready, strict=True) if is_ready}
        return found == set(kinds)


def look(url: str, kind: Kind) -> Answer:
    """Ask a Space what it is doing. Raises `SpacesUnavailableError` for what no waiting mends."""
    try:
        response = request(url, "GET", _READING[kind], kind)
    except httpx.TransportError as error:
        if _no_such_host(error):
            raise SpacesUnavailableError(f"{url}: there is no such host; check {_OPTION[kind]}") from error
        return Answer(f"not reachable ({type(error).__name__})")
    answer = _said(response, kind) or _cold(response, url, kind)
    if answer.state == NOT_SET_UP:
        raise SpacesUnavailableError(f"{url} is not set up: its page says which variable or secret it lacks")
    return answer


def check_key(url: str, kind: Kind) -> None:
    """Ask for what needs the key but changes nothing; raises `SpacesUnavailableError` for a wrong key."""
    try:
        if kind == "replica":
            response = request(url, "POST", "/v1/completions", json={})
        else:
            response = request(url, "DELETE", f"/sessions/{uuid4()}", kind)
    except httpx.TransportError:
        return  # the next real request finds out
    if response.status_code in (401, 403):
        raise SpacesUnavailableError(_wrong_key(url, kind, response.status_code))


def _wrong_key(url: str, kind: Kind, status: int) -> str:
    if space_access.is_own(url):
        return (
            f"{url} does not take this trainer's key ({status}): set SPACE_KEY to the Space's,"
            " with `set -a; . .deploy/<owner>/env; set +a` for one that trainer.deploy made"
        )
    other = ", or set ENV_KEY to the key that you were given for it" if kind == "env" else ""
    return f"{url} wants a key ({status}) and is not one of SPACES: add it there if it is yours{other}"


def request(url: str, method: str, path: str, kind: Kind = "replica", **content: Any) -> httpx.Response:
    """One request with the headers that this Space needs. Raises httpx.TransportError."""
    try:
        full = f"{url.rstrip('/')}{path}"
        return httpx.request(method, full, headers=_HEADERS[kind](url), timeout=10.0, **content)
    except ValueError as error:  # a key or a token that no header can hold
        raise SpacesUnavailableError(str(error)) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise SpacesUnavailableError(
            f"{url!r} is not the URL of a Space: write https://<owner>-<name>.hf.space"
        ) from error


def _said(response: httpx.Response, kind: Kind) -> Answer | None:
    """What the app says of itself, or None if it is not the app that answered."""
    try:
        said = response.json()
        state = str(said["state" if kind == "replica" else "status"])
    except (ValueError, KeyError, TypeError):
        return None
    if kind == "env" and state not in (_READY["env"], NOT_SET_UP):
        return None  # another app has a /health, too
    return Answer(state, up=True, error=said.get("error"))


def _cold(response: httpx.Response, url: str, kind: Kind) -> Answer:
    """Another one answers in the app's place: the Hub, which starts it, or whoever has that URL."""
    status = response.status_code
    if status in (401, 403):
        raise SpacesUnavailableError(f"{url} may not be read by this trainer ({status}): {_READABLE}")
    # To whom may not see it, the Hub says that a private Space does not exist. Its page for a Space that
    # starts is HTML, whatever the status.
    json = "json" in response.headers.get("content-type", "")
    if (json or status >= 300) and status < 500 and status not in (408, 425, 429):
        raise SpacesUnavailableError(
            f"{url} is no {kind}, it answers {status}: give the Space's own URL with {_OPTION[kind]}, such as"
            f" https://<owner>-<name>.hf.space; if it is private, {_READABLE}"
        )
    return Answer(f"not up yet ({status})")


def _no_such_host(error: BaseException | None) -> bool:
    """True for a name that does not exist; a resolver that cannot be asked just now is another fault."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False
