"""The routes of a session over plain HTTP."""

from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID, uuid4

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

from env_space.clients import client_of
from env_space.messages import MOVE, Closed, Guess, Opened, Opening, Problem
from env_space.rules import Rules
from env_space.sessions import Origin, Sessions
from env_space.wordle import MAX_GUESSES, OPENING, Move


class Games:
    """Open, guess, close. No handler awaits once it has read its request, so the store needs no locks."""

    def __init__(self, sessions: Sessions, rules: Rules, via: str = "http") -> None:
        self._sessions = sessions
        self._rules = rules
        self._via = via

    def route(self, app: FastAPI, at: str = "/sessions", *, documented: bool = True) -> None:
        """Offer the routes on `app`, below `at`."""
        options: dict[str, Any] = {"include_in_schema": documented}
        app.post(at, status_code=201, responses=problems(400, 401, 409, 413, 422, 503), **options)(self.open)
        app.router.add_api_route(
            f"{at}/{{session}}/guess",
            self.guess,
            methods=["POST"],
            responses=problems(401, 404, 409, 413, 422),
            route_class_override=MoveRoute,
            **options,
        )
        app.delete(f"{at}/{{session}}", responses=problems(401, 404, 422), **options)(self.close)

    async def open(self, opening: Opening, request: Request) -> Opened:
        """Start a game whose secret the seed names."""
        game = self._rules.deal(opening.seed, opening.split)
        origin = Origin(opening.seed, opening.split, self._via)
        session = self._sessions.open(opening.id or uuid4(), origin, game, client_of(request.scope))
        return Opened(
            session=session.id,
            observation=OPENING,
            max_guesses=MAX_GUESSES,
            length=self._rules.length,
            hard_mode=self._rules.hard_mode,
        )

    async def guess(self, session: UUID, guess: Guess) -> Move:
        """Play a move; an invalid word costs the turn too. `reward` is that of the whole game so far."""
        return self._sessions.play(session, guess.turn, guess.word)

    async def close(self, session: UUID) -> Closed:
        """End a session and read its final reward; a game that was not over is given up."""
        game = self._sessions.close(session)
        parts = game.reward_parts()
        return Closed(
            solved=game.solved,
            turns=game.turns,
            reward=parts.total,
            reward_parts=parts,
            secret=game.secret,
        )


class MoveRoute(APIRoute):
    """Reads and writes a move with pydantic alone: most requests are moves, and this halves their cost."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What FastAPI calls instead of its own reading, checking and writing."""

        async def play(request: Request) -> Response:
            session = _read_id(request.path_params["session"])
            move = await self.endpoint(session, _read_guess(await request.body()))
            return Response(MOVE.dump_json(move), media_type="application/json")

        return play


def _read_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        found = {"type": "uuid_parsing", "loc": ("path", "session"), "msg": "A session is named by a UUID"}
        raise RequestValidationError([found]) from None


def _read_guess(body: bytes) -> Guess:
    try:
        return Guess.model_validate_json(body)
    except ValidationError as error:
        found = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(found) from None


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may refuse with, for the API's description."""
    return {status: {"model": Problem} for status in statuses}
