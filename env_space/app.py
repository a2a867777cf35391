"""Serves games of Wordle over HTTP and OpenEnv's WebSocket, and a page on which people play."""

import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import prometheus_client as prometheus
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from env_space import openenv, watch
from env_space.game import MAX_GUESSES, MAX_SEED, OPENING, Move, RewardParts, Rules, Split
from env_space.log import log_as_json
from env_space.problems import problem, refusals
from env_space.sessions import Origin, Session, Sessions
from env_space.settings import Settings
from env_space.watch import MAX_WATCHED
from space_guard.guard import FRAMING, SAFE_HEADERS, Guard, Route
from space_guard.serving import CONNECTIONS, serve
from space_guard.setup import SettingsError, Setup

MAX_BODY_BYTES = 16 * 1024
MAX_PLAYED = 64  # games on the page at the same time
PAGE = Path(__file__).with_name("page")
# The page may load nothing from other sites. The page also shows what a trained policy writes; this header
# prevents that the browser runs such a text as a script.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'"}
_HISTOGRAM_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

# Paths that need no key: the page, its games, and what can only be read. All other paths need the key, so a
# new route is closed until you add it here.
OPEN = r"/|/(health|words|metrics|schema|metadata|watch|mcp)|/(docs|redoc|openapi\.json|agents\.md)"
OPEN += r"|/(page|play)(/.*)?"
ROUTES = (
    Route(OPEN, method=None, max_body=MAX_BODY_BYTES),
    Route(".*", method=None, keyed=True, max_body=MAX_BODY_BYTES),
)

SETUP = Setup(Settings, "environment", then="game", needs=Path(__file__).with_name("setup.toml"))

_log = logging.getLogger("wordle")

# In JSON, 3.0 and 3 are the same number, so both are accepted.
_INTEGER = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)


class Opening(BaseModel):
    """A request for a game. If you send the same request again, `id` included, you get the same game."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Annotated[int, Field(gt=-MAX_SEED, lt=MAX_SEED, description="selects the secret"), _INTEGER]
    split: Annotated[Split, Field(description="train, or held_out: words not used in train")] = "train"
    id: Annotated[UUID | None, Field(strict=False, description="chosen by you; makes a retry safe")] = None


class Opened(BaseModel):
    """A new game, before its first guess."""

    session: UUID
    observation: str = OPENING
    max_guesses: int = MAX_GUESSES
    length: int
    hard_mode: bool


class Guess(BaseModel):
    """Move number `turn` of a game. If you send it again, you get the same answer; it is not played twice."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # A `min_length`, even 0, makes pydantic refuse lone surrogates, which no response in UTF-8 can contain.
    word: Annotated[str, Field(min_length=0)]
    turn: Annotated[int, Field(ge=1, lt=2**31, description="1 for the first move"), _INTEGER]


class Closed(BaseModel):
    """How a game ended."""

    solved: bool
    turns: int
    reward: float
    reward_parts: RewardParts
    secret: str


class Words(BaseModel):
    """All possible secrets, which of them are held out, the length of a word, and the guesses per game."""

    answers: tuple[str, ...]
    held_out: tuple[str, ...]
    length: int
    max_guesses: int = MAX_GUESSES


class Metrics:
    """The metrics of a service. Games and guesses are counted when a game ends."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        labels = ["outcome", "split", "via"]
        self._games = prometheus.Counter("wordle_games", "Games that ended", labels, registry=registry)
        self._guesses = prometheus.Counter("wordle_guesses", "Guesses played", ["kind"], registry=registry)
        self.active = prometheus.Gauge("wordle_active_sessions", "API games in play", registry=registry)
        self.capacity = prometheus.Gauge("wordle_max_sessions", "Max API games in play", registry=registry)
        self.seconds = prometheus.Histogram(
            "wordle_move_seconds", "Seconds to play a move", ["via"], buckets=_HISTOGRAM_S, registry=registry
        )

    def count_game(self, session: Session) -> None:
        origin = session.origin
        game = session.game
        self._games.labels(session.outcome, origin.split, origin.via).inc()
        self._guesses.labels("invalid").inc(game.invalid)
        self._guesses.labels("repeated").inc(game.repeated)
        self._guesses.labels("new").inc(game.turns - game.invalid - game.repeated)


def create_app(settings: Settings) -> FastAPI:
    """Build the service, with empty stores of games. Raises `SettingsError` as `Rules` does."""
    rules = Rules(settings)
    metrics = Metrics()

    def ended(session: Session) -> None:
        metrics.count_game(session)
        _log.info("game ended", extra={"fields": session.summary()})

    ttl_s = settings.session_ttl_s
    count = metrics.count_game
    more = "or raise WORDLE_MAX_SESSIONS"
    sessions = Sessions(settings.max_sessions, ttl_s, ended, fix=f"try again in a moment, {more}")
    # Visitors' games have their own stores, so they take no room from trainers' games. The log leaves
    # out visitors' games, so a client without the key cannot fill the log.
    visitors = Sessions(MAX_PLAYED, ttl_s, count)
    watched = Sessions(MAX_WATCHED, ttl_s, count)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        _log.info("stopped with %d games in play", sum(map(len, (sessions, visitors, watched))))

    # A redirect to a path with a slash would repeat the request's Host.
    app = FastAPI(title="Wordle environment", description=__doc__, lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(Guard, routes=ROUTES, key=settings.required_key, secret="WORDLE_KEY", refuse=problem)
    _answer_problems(app)
    http_seconds, ws_seconds = (metrics.seconds.labels(via) for via in ("http", "ws"))
    _add_games(app, sessions, rules, http_seconds, "/sessions", "http")
    _add_games(app, visitors, rules, http_seconds, "/play", "page")
    openenv.add_routes(app, sessions, rules, ws_seconds)
    watch.add_route(app, watched, rules, settings)
    _add_pages(app, sessions, rules, metrics)
    return app


def _add_games(
    app: FastAPI, sessions: Sessions, rules: Rules, seconds: prometheus.Histogram, at: str, via: str
) -> None:
    """Add the routes of games. No handler awaits after reading the request, so the store needs no locks."""
    games = APIRouter(prefix=at, include_in_schema=via == "http")
    settings = rules.settings

    @games.post("", status_code=201, responses=refusals(400, 401, 409, 413, 422, 503))
    async def open(opening: Opening) -> Opened:
        """Start a game. The seed selects its secret."""
        game = rules.deal(opening.seed, opening.split)
        origin = Origin(opening.seed, opening.split, via)
        session = sessions.open(opening.id or uuid4(), origin, game)
        return Opened(session=session.id, length=settings.length, hard_mode=settings.hard_mode)

    @games.post("/{session}/guess", responses=refusals(400, 401, 404, 409, 413, 422))
    async def guess(session: UUID, move: Guess) -> Move:
        """Play a move. An invalid word also costs a turn. `reward` is the reward of the game so far."""
        with seconds.time():
            return sessions.play(session, move.turn, move.word)

    @games.delete("/{session}", responses=refusals(401, 404, 422))
    async def close(session: UUID) -> Closed:
        """End a game (a session) and return its final reward. A game that is not over counts as given up."""
        game = sessions.close(session)
        parts = game.reward_parts()
        return Closed(
            solved=game.solved, turns=game.turns, reward=parts.total, reward_parts=parts, secret=game.secret
        )

    app.include_router(games)


def _add_pages(app: FastAPI, sessions: Sessions, rules: Rules, metrics: Metrics) -> None:
    """Add the read-only routes."""
    words = Words(answers=rules.train + rules.held_out, held_out=rules.held_out, length=rules.settings.length)
    metrics.active.set_function(sessions.__len__)
    metrics.capacity.set(sessions.capacity)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", response_class=FileResponse, include_in_schema=False)
    async def home() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/agents.md", response_class=FileResponse, include_in_schema=False)
    async def agents() -> FileResponse:
        return FileResponse(PAGE.with_name("agents.md"), media_type="text/plain")

    @app.get("/words")
    async def list_words() -> Words:
        """List all words that can be the secret, always in the same order."""
        return words

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        """Say whether the service is up, how many API games are in play, and how many may be."""
        return {"status": "healthy", "sessions": len(sessions), "max_sessions": sessions.capacity}

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def render_metrics() -> Response:
        text = prometheus.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)


def _answer_problems(app: FastAPI) -> None:
    """Answer every refusal with a JSON object whose `detail` is a sentence that names the fix."""

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        if found["type"] == "json_invalid":
            sentence = f"The body is not JSON ({found['ctx']['error']})."
        elif found["loc"] == ("body",):
            sentence = "The body must be a JSON object, sent as Content-Type: application/json."
        else:
            (place, field, *_) = found["loc"]
            reason = found["msg"].removeprefix("Value error, ")
            sentence = f"The {place}'s '{field}' cannot be used: {reason}."
        return problem(HTTPException(422, f"{sentence} GET /docs shows what to send."))

    @app.exception_handler(HTTPException)
    async def unroutable(_: Request, error: HTTPException) -> JSONResponse:
        sentence = error.detail
        if error.status_code == HTTPStatus.BAD_REQUEST:
            sentence = "The body could not be parsed: send a small JSON object."
        elif sentence == HTTPStatus(error.status_code).phrase:  # from the router: no such path or method
            sentence = f"{sentence}: the API has no such path or method; GET /docs lists all."
        return problem(HTTPException(error.status_code, sentence, error.headers))


class _Socket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which also ends a connection whose handshake it cannot read.

    It logs no headers, even at level DEBUG: one of them is the key.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn.debug = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None:
            self.transport.close()


def server_options() -> dict[str, Any]:
    """uvicorn's options."""
    return {
        "headers": [("Content-Security-Policy", FRAMING), ("Referrer-Policy", "no-referrer"), *SAFE_HEADERS],
        "log_config": None,
        "timeout_graceful_shutdown": 10,
        "ws": _Socket,
        "ws_max_size": MAX_BODY_BYTES,
        "ws_per_message_deflate": False,
        "ws_ping_interval": 30,
        "ws_ping_timeout": 300,  # a client that trains may answer no ping for minutes, and is not dead
    }


def main() -> None:
    """Serve with the settings in the environment. If a setting is missing or wrong, a Space on the Hub says
    so on its page; elsewhere the program exits."""
    log_as_json()
    try:
        settings = Settings.read(os.environ)
        app = create_app(settings)
    except SettingsError as error:
        if "SPACE_ID" not in os.environ:
            sys.exit(f"The Wordle Space cannot start: {error}")
        _log.error(SETUP.sentence(error.problems))
        host, port = Settings.listen_address(os.environ)
        return serve(SETUP.app(error.problems), host=host, port=port, **server_options())
    wanted = max(CONNECTIONS, 1024 + 2 * settings.max_sessions)  # each game of a trainer gets two
    return serve(app, connections=wanted, host=settings.host, port=settings.port, **server_options())


if __name__ == "__main__":
    main()
