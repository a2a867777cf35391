"""A game that the policy of a replica plays, streamed to who watches as server-sent events."""

import json
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from env_space.clients import client_of
from env_space.games import problems
from env_space.messages import MOVE
from env_space.replica import Replica, ReplicaError, connect
from env_space.rules import Rules
from env_space.sessions import Origin, Session, SessionError, Sessions
from env_space.settings import Settings
from env_space.wordle import MAX_GUESSES

MAX_WATCHED, EACH_WATCHED = 8, 2  # games at once, together and of one address: they take the replica's time
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class NoReplicaError(Exception):
    """There is no policy to watch; the message is a sentence that says why."""


class Watch:
    """The route `/watch`. Each request is a new game on the same engine as any; `sessions` has no others."""

    def __init__(self, sessions: Sessions, rules: Rules, settings: Settings) -> None:
        self._sessions, self._rules = sessions, rules
        self._url, self._prompt = settings.replica_url, settings.replica_prompt
        self._key = settings.replica_key

    def route(self, app: FastAPI) -> None:
        """Offer the route on `app`."""
        app.get("/watch", response_class=StreamingResponse, responses=problems(404, 429, 503))(self.watch)

    async def watch(self, request: Request) -> StreamingResponse:
        """Events of a game that the policy plays: `opened`, a `turn` a move, then `ended` or `problem`."""
        if self._url is None:
            raise NoReplicaError(
                "No policy is connected; set WORDLE_REPLICA_URL to the address of a replica to watch it play."
            )
        seed, client = secrets.randbits(31), client_of(request.scope)
        session = self._sessions.open(uuid4(), Origin(seed, via="watch"), self._rules.deal(seed), client)
        return _Stream(self._events(self._url, session), partial(self._sessions.leave, session.id))

    async def _events(self, url: str, session: Session) -> AsyncIterator[str]:
        yield _event("opened", seed=session.origin.seed, max_guesses=MAX_GUESSES, length=self._rules.length)
        try:
            async for event in self._play(url, session):
                yield event
        except (ReplicaError, SessionError) as error:
            yield _event("problem", detail=str(error))

    async def _play(self, url: str, session: Session) -> AsyncIterator[str]:
        async with connect(url, self._key) as http:
            replica = Replica(http, self._prompt)
            while not session.game.over:
                turn = await replica.turn()
                if turn.word is None:
                    self._sessions.close(session.id)
                    yield _event("turn", text=turn.text, version=turn.version, move=None)
                    break
                move = self._sessions.play(session.id, session.game.turns + 1, turn.word)
                replica.tell(move.observation)
                shown = MOVE.dump_python(move)
                yield _event("turn", text=turn.text, version=turn.version, move=shown)
        yield _event("ended", solved=session.game.solved, secret=session.game.secret)


class _Stream(StreamingResponse):
    """Events, and what is done when they end; also where nobody stayed for the first of them."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], object]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
