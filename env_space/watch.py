"""Streams games of a replica's policy to visitors, as server-sent events."""

import json
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

import httpx
from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse

from env_space.game import MAX_GUESSES, MOVE, GameError, Rules
from env_space.problems import refusals
from env_space.sessions import Origin, Session, Sessions
from env_space.settings import Settings
from space_guard.guard import KEY_HEADER

MAX_WATCHED = 8  # games at the same time; they are limited because they use the replica
TIMEOUT_S = 60.0
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_CALLED_WORD = re.compile(r'"word"\s*:\s*"([^"]*)"')
_ASLEEP = "If it is a sleeping Space, open its page to wake it, and try again in a few minutes."
# Created once: loading the certificates for each game would block all players for tens of milliseconds.
_TLS = httpx.create_ssl_context(trust_env=False)
# In training, the chat template wrote this tool into the prompt. So the policy must get the tool here, too.
_TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the secret word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A five-letter English word."}},
            "required": ["word"],
        },
    },
}


class Replica:
    """A conversation with the policy of one replica, over its OpenAI-compatible chat endpoint."""

    def __init__(self, http: httpx.AsyncClient, prompt: str) -> None:
        self._http = http
        self._messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]

    async def turn(self) -> tuple[str, str | None, str]:
        """Let the policy play a turn. Returns its text, its guess (None if it called no tool), and the
        oldest version of its weights. Raises GameError."""
        try:
            answer = await self._http.post("/v1/chat/completions", json=self.request())
            if not answer.is_success:
                reason = f"it answered with status {answer.status_code}"
                with suppress(ValueError, LookupError, TypeError, RecursionError):
                    reason = str(answer.json()["error"]["message"])[:300]
                raise GameError(502, f"The replica cannot play now: {reason}. {_ASLEEP}")
            text = answer.json()["choices"][0]["message"]["content"] or ""
            made_by = json.loads(answer.headers.get("x-policy-versions", "[]"))
            versions = (entry["weights"]["version"] for entry in made_by if entry["weights"])
            oldest = str(min(versions, default=""))
        except httpx.TimeoutException:
            raise GameError(502, f"The replica did not answer within {TIMEOUT_S:.0f} s. {_ASLEEP}") from None
        except httpx.HTTPError:
            raise GameError(502, f"The replica cannot be reached. {_ASLEEP}") from None
        except (ValueError, LookupError, TypeError, RecursionError):  # the last: it is nested too deeply
            raise GameError(502, f"The replica's answer is not one of vLLM's. {_ASLEEP}") from None
        self._messages.append({"role": "assistant", "content": text})
        called = _CALLED_WORD.findall(text)
        return text, called[-1] if called else None, oldest

    def observe(self, observation: str) -> None:
        self._messages.append({"role": "tool", "content": observation, "tool_call_id": "guess"})

    def request(self) -> dict[str, Any]:
        return {
            "messages": self._messages,
            "tools": [_TOOL],
            "tool_choice": "none",  # leaves the call in the text, so vLLM needs no tool parser
            "temperature": 1.0,
            "include_stop_str_in_output": True,  # if the end of a call is a stop string, keep it in the text
            "chat_template_kwargs": {"enable_thinking": False},
        }


def replica_headers(url: str, key: str) -> dict[str, str]:
    """Headers with the replica's `key`. If `url` looks like a Space of this owner, also the Hub token."""
    owner = os.environ.get("SPACE_ID", "").partition("/")[0].replace("_", "-")  # hyphens, as in host names
    space = rf"https://{re.escape(owner)}-[a-z0-9-]+\.hf\.space(:443)?(/.*)?"
    token = os.environ.get("HF_TOKEN", "") if owner and re.fullmatch(space, url, re.IGNORECASE) else ""
    headers = {KEY_HEADER: key, "Authorization": token and f"Bearer {token}"}
    return {name: value for name, value in headers.items() if value}


def add_route(app: FastAPI, sessions: Sessions, rules: Rules, settings: Settings) -> None:
    """Add `/watch`: each request starts a new game. `sessions` is a store for watched games only."""

    async def open_session() -> AsyncIterator[Session]:
        if settings.replica_url is None:
            raise GameError(404, "No policy is connected: set WORDLE_REPLICA_URL to the replica's address.")
        seed = secrets.randbits(31)
        session = sessions.open(uuid4(), Origin(seed, via="watch"), rules.deal(seed))
        try:
            yield session
        finally:  # even if the client leaves before the first event
            sessions.end(session)

    @app.get("/watch", response_class=StreamingResponse, responses=refusals(404, 503))
    async def watch(session: Annotated[Session, Depends(open_session)]) -> StreamingResponse:
        """Stream a game that the policy plays: `opened`, a `turn` per answer, then `ended` or `problem`."""
        return StreamingResponse(events(session), headers=_HEADERS, media_type="text/event-stream")

    async def events(session: Session) -> AsyncIterator[str]:
        yield _event("opened", seed=session.origin.seed, max_guesses=MAX_GUESSES, length=settings.length)
        url = settings.replica_url or ""  # without a URL, `open_session` refuses the request
        headers = replica_headers(url, settings.replica_key)
        try:
            async with httpx.AsyncClient(
                base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=_TLS
            ) as http:
                replica = Replica(http, settings.replica_prompt)
                while not session.game.over:
                    text, word, version = await replica.turn()
                    if word is None:  # the policy gives up
                        sessions.end(session)
                        yield _event("turn", text=text, version=version, move=None)
                        break
                    move = sessions.play(session.id, session.game.turns + 1, word)
                    replica.observe(move.observation)
                    yield _event("turn", text=text, version=version, move=MOVE.dump_python(move))
            yield _event("ended", solved=session.game.solved, secret=session.game.secret)
        except GameError as error:
            yield _event("problem", detail=error.detail)


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
