"""Games of Wordle as sessions over plain HTTP, for trainers and for anyone with curl."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from env_space.messages import Closed, Guess, Health, Opened, Opening, Problem, Words
from env_space.problems import BodyLimit, answer_problems
from env_space.sessions import Sessions
from env_space.settings import Settings, settings_from
from env_space.wordle import LENGTH, MAX_GUESSES, OPENING, Game, Move, answers, guesses, secret_for

MAX_BODY_BYTES = 16 * 1024
REAP_EVERY_S = 5.0
KEEP_ALIVE_S = 120  # a policy thinks for seconds between two moves on one connection


class Games:
    """The routes of a session. No handler awaits, so each runs whole and the store needs no locks."""

    def __init__(self, sessions: Sessions, words: tuple[str, ...]) -> None:
        self._sessions = sessions
        self._words = words

    async def open(self, opening: Opening) -> Opened:
        """Start a game whose secret the seed names."""
        game = Game(secret_for(opening.seed, self._words), guesses())
        session = self._sessions.open(opening.id or uuid4(), opening.seed, game)
        return Opened(session=session.id, observation=OPENING, max_guesses=MAX_GUESSES)

    async def guess(self, session: UUID, guess: Guess) -> Move:
        """Play a move; an invalid word costs the turn too. `reward` is that of the whole game so far."""
        return self._sessions.play(session, guess.turn, guess.word)

    async def close(self, session: UUID) -> Closed:
        """End a session and read its final reward; a game that was not over is given up."""
        game = self._sessions.close(session)
        parts = game.reward_parts()
        return Closed(solved=game.solved, turns=game.turns, reward=parts.total, reward_parts=parts)


class Pages:
    """The routes that only read."""

    def __init__(self, sessions: Sessions, max_sessions: int, words: tuple[str, ...]) -> None:
        self._sessions = sessions
        self._max_sessions = max_sessions
        self._words = Words(answers=words, length=LENGTH, max_guesses=MAX_GUESSES)
        self._home = Path(__file__).with_name("home.html").read_text("utf-8")

    async def home(self) -> str:
        """Say what this is."""
        return self._home

    async def words(self) -> Words:
        """Every word that can be the secret, in an order that is the same everywhere."""
        return self._words

    async def health(self) -> Health:
        """Whether the service is up, and how many games are in play."""
        return Health(status="ok", sessions=len(self._sessions), max_sessions=self._max_sessions)


def create_app(settings: Settings) -> FastAPI:
    """The service with an empty store. Raises ValueError if `settings.answers` is more than there are."""
    words = answers(settings.answers)
    sessions = Sessions(settings.max_sessions, settings.session_ttl_s)
    app = FastAPI(title="Wordle environment", description=__doc__, lifespan=_reaping(sessions))
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    answer_problems(app)
    _route_games(app, Games(sessions, words))
    _route_pages(app, Pages(sessions, settings.max_sessions, words))
    return app


def _route_games(app: FastAPI, games: Games) -> None:
    app.post("/sessions", status_code=201, responses=_problems(400, 409, 413, 422, 503))(games.open)
    app.post("/sessions/{session}/guess", responses=_problems(400, 404, 409, 413, 422))(games.guess)
    app.delete("/sessions/{session}", responses=_problems(404, 422))(games.close)


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem} for status in statuses}


def _route_pages(app: FastAPI, pages: Pages) -> None:
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(pages.home)
    app.get("/words")(pages.words)
    app.get("/health")(pages.health)


def _reaping(sessions: Sessions) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(_reap_forever(sessions))
        yield
        reaper.cancel()

    return lifespan


async def _reap_forever(sessions: Sessions) -> None:
    """Every request reaps too; this frees the memory while none comes."""
    while True:
        await asyncio.sleep(REAP_EVERY_S)
        sessions.reap()


def main() -> None:
    """Serve with the settings of the environment, in one process: the games live in its memory."""
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except ValueError as error:
        sys.exit(f"The Wordle Space cannot start. {error}")
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


if __name__ == "__main__":
    main()
