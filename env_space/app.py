"""Games of Wordle over plain HTTP and over OpenEnv's WebSocket, and a page where a person plays."""

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import prometheus_client as prometheus
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from env_space import openenv, watch
from env_space.game import (
    MAX_GUESSES,
    MAX_SEED,
    MOVE,
    OPENING,
    GameError,
    Move,
    RewardParts,
    Rules,
    Split,
    rules_from,
)
from env_space.sessions import Origin, Session, Sessions
from env_space.settings import Settings
from env_space.watch import MAX_WATCHED, MAX_WATCHED_EACH
from space_guard.limits import PROXIES, Limits, client_address, limited_http, log_as_json, open_files, serve
from space_guard.requests import (
    FRAMING,
    KEY_HEADER,
    SAFE_HEADERS,
    given_key,
    has_key,
    limit_body,
    problem,
    refusals,
)
from space_guard.setup import NEW_KEY, Need, Problems, SettingsError, Setup, key_problem

MAX_BODY_BYTES = 16 * 1024
LIMITS = Limits(
    request_s=20.0, covers_body=True, unread_s=30.0, head_bytes=16 * 1024, pipelined=8, keep_active=False
)
MAX_VISITORS = 1024  # connections without the key; if more games are allowed, as many as games
MAX_PLAYED, MAX_PLAYED_EACH = 64, 8  # games on the page at the same time: in total, and per address
LOG_LINES = 600  # per minute and source line
REAP_EVERY_S = 5.0
KEEP_ALIVE_S = 120  # a policy thinks for seconds between two moves on one connection
STOP_WITHIN_S = 10
# A client may spend minutes on a training step. Games expire anyway; this only frees sockets.
PING_EVERY_S, PING_TIMEOUT_S = 30, 300
RETRY_AFTER_S = "1"  # a game takes seconds, and there is room as soon as one ends
PAGE = Path(__file__).with_name("page")
# The page loads nothing from other sites, and no text of a policy can run as a script.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'"}
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SPARE_FILES = 64  # besides connections: the log, the event loop's own, the watched replica

# All other paths need the key, so a route that is added is closed until it is listed here.
OPEN = re.compile(
    r"/|/(health|words|metrics|schema|metadata|watch|mcp)|/(docs|redoc|openapi\.json)|/(page|play)(/.*)?"
)
KEY_MISSING = (
    f"This needs the Space's key; send its WORDLE_KEY in the header {KEY_HEADER} (trainers: set SPACE_KEY)."
)
KEY_WRONG = f"The key in {KEY_HEADER} is not this Space's; compare it with its WORDLE_KEY."

SETUP = Setup(
    space="environment",
    then="game",
    needs={
        "WORDLE_KEY": Need(
            "secret",
            "Opens the API. Trainers send it from their variable SPACE_KEY. Visitors play on the page without"
            " it. To let anyone use the API, set the variable WORDLE_OPEN to true instead.",
            NEW_KEY,
        )
    },
    refusal=lambda sentence: {"detail": sentence},
)

_log = logging.getLogger("wordle")

# In JSON, 3.0 and 3 are the same number.
_INTEGER = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)


class Opening(BaseModel):
    """A request for a game. Sent again with the same `id` and seed, it finds the game it opened."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Annotated[int, Field(gt=-MAX_SEED, lt=MAX_SEED, description="selects the secret"), _INTEGER]
    split: Annotated[Split, Field(description="train, or the tenth of the words held out of it")] = "train"
    id: Annotated[UUID | None, Field(strict=False, description="of your choice; makes a retry safe")] = None


class Opened(BaseModel):
    """A game that waits for its first guess."""

    session: UUID
    observation: str
    max_guesses: int
    length: int


class Guess(BaseModel):
    """Move number `turn` of a game. Sent again, it is played once and answered the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    word: str
    turn: Annotated[int, Field(ge=1, lt=2**31, description="1 for the first move"), _INTEGER]


class Closed(BaseModel):
    """How a game ended."""

    solved: bool
    turns: int
    reward: float
    reward_parts: RewardParts
    secret: str


class Words(BaseModel):
    """Every possible secret, the ones that no training game has, and the size of a game."""

    answers: tuple[str, ...]
    held_out: tuple[str, ...]
    length: int
    max_guesses: int


class Health(BaseModel):
    """Whether the service is up, and how full it is."""

    status: str
    sessions: int
    max_sessions: int


class Metrics:
    """The counters of one service. Games and guesses are counted when their game ends."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        labels = ["outcome", "split", "via"]
        self._games = prometheus.Counter("wordle_games", "Games that ended", labels, registry=registry)
        self._guesses = prometheus.Counter("wordle_guesses", "Guesses played", ["kind"], registry=registry)
        self.active = prometheus.Gauge("wordle_active_sessions", "Games in play", registry=registry)
        self.capacity = prometheus.Gauge(
            "wordle_max_sessions", "Games that may be in play", registry=registry
        )
        about = "From a move's request being read to its answer being written"
        seconds = prometheus.Histogram(
            "wordle_move_seconds", about, ["via"], buckets=_BUCKETS_S, registry=registry
        )
        self._took = {via: seconds.labels(via).observe for via in ("http", "ws")}

    def count_game(self, session: Session) -> None:
        origin, game = session.origin, session.game
        self._games.labels(session.outcome, origin.split, origin.via).inc()
        self._guesses.labels("invalid").inc(game.invalid)
        self._guesses.labels("repeated").inc(game.repeated)
        self._guesses.labels("new").inc(game.turns - game.invalid - game.repeated)

    def move_took(self, via: str, seconds: float) -> None:
        self._took[via](seconds)


def create_app(settings: Settings, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """The service with an empty store; games age by `clock`, in seconds.

    Raises `ValueError` if the word list has fewer words than `settings.answers`.
    """
    rules, metrics = rules_from(settings), Metrics()

    def ended(session: Session) -> None:
        metrics.count_game(session)
        _log.info("game ended", extra={"fields": session.summary()})

    sessions = Sessions(settings.max_sessions, settings.session_ttl_s, ended, clock)
    # Visitors' games have stores of their own, so they take no room from a trainer. They are counted but not
    # logged, so that a client without the key cannot fill the log.
    visitors_store = partial(
        Sessions, ttl_s=settings.session_ttl_s, on_end=metrics.count_game, clock=clock, advice=""
    )
    visitors = visitors_store(MAX_PLAYED, per_client=MAX_PLAYED_EACH)
    watched = visitors_store(MAX_WATCHED, per_client=MAX_WATCHED_EACH)
    stores = (sessions, visitors, watched)

    async def reap_forever() -> None:
        """Every request reaps too; this frees memory when no request comes."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            for store in stores:
                store.reap()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(reap_forever())
        yield
        reaper.cancel()
        _log.info("stopped with %d games in play", sum(map(len, stores)))

    app = FastAPI(title="Wordle environment", description=__doc__, lifespan=lifespan)
    app.add_middleware(limit_body, max_bytes=MAX_BODY_BYTES)
    app.state.metrics = metrics
    app.add_middleware(_check_key, key=settings.required_key)
    _answer_problems(app)
    _add_games(app, sessions, rules, "/sessions", "http", True)
    _add_games(app, visitors, rules, "/play", "page", False)
    openenv.add_routes(app, sessions, rules, metrics.move_took)
    watch.add_route(app, watched, rules, settings)
    _add_pages(app, sessions, rules, metrics)
    return app


def _check_key(app: ASGIApp, key: str) -> ASGIApp:
    """ASGI middleware: reading and the page's games are open, the API needs the key. Without a key everything
    is open, for a machine that is not reachable by others."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        opened = scope["type"] == "lifespan" or OPEN.fullmatch(scope["path"])
        if opened or has_key(key, scope["headers"]):
            return await app(scope, receive, send)
        refusal = problem(401, KEY_WRONG if given_key(scope["headers"]) else KEY_MISSING)
        if scope["type"] == "websocket":
            return await WebSocket(scope, receive, send).send_denial_response(refusal)
        return await refusal(scope, receive, send)

    return checked


def _add_games(app: FastAPI, sessions: Sessions, rules: Rules, at: str, via: str, documented: bool) -> None:
    """Add the routes of a session. No handler awaits after it reads its request: the store needs no locks."""
    statuses = refusals(400, 401, 409, 413, 422, 503)

    @app.post(at, status_code=201, responses=statuses, include_in_schema=documented)
    async def open(opening: Opening, request: Request) -> Opened:
        """Start a game whose secret the seed selects."""
        game = rules.deal(opening.seed, opening.split)
        origin = Origin(opening.seed, opening.split, via)
        session = sessions.open(opening.id or uuid4(), origin, game, client_address(request.scope))
        return Opened(
            session=session.id,
            observation=OPENING,
            max_guesses=MAX_GUESSES,
            length=rules.settings.length,
        )

    async def guess(session: UUID, guess: Guess) -> Move:
        """Play a move; an invalid word costs the turn too. `reward` is that of the game so far."""
        return sessions.play(session, guess.turn, guess.word)

    app.router.add_api_route(
        f"{at}/{{session}}/guess",
        guess,
        methods=["POST"],
        responses=refusals(401, 404, 409, 413, 422),
        route_class_override=_MoveRoute,
        include_in_schema=documented,
    )

    @app.delete(f"{at}/{{session}}", responses=refusals(401, 404, 422), include_in_schema=documented)
    async def close(session: UUID) -> Closed:
        """End a session and read its final reward; a game that is not over is given up."""
        game = sessions.close(session)
        parts = game.reward_parts()
        return Closed(
            solved=game.solved, turns=game.turns, reward=parts.total, reward_parts=parts, secret=game.secret
        )


def _add_pages(app: FastAPI, sessions: Sessions, rules: Rules, metrics: Metrics) -> None:
    """Add the routes that only read: the page for people, the words, health, and metrics for Prometheus."""
    every_word, length = rules.train + rules.held_out, rules.settings.length
    words = Words(answers=every_word, held_out=rules.held_out, length=length, max_guesses=MAX_GUESSES)
    metrics.active.set_function(sessions.__len__)
    metrics.capacity.set(sessions.capacity)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", response_class=FileResponse, include_in_schema=False)
    async def home() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/words")
    async def list_words() -> Words:
        """Every word that can be the secret, in an order that is the same everywhere."""
        return words

    @app.get("/health")
    async def health() -> Health:
        """Whether the service is up, and how many games are in play."""
        return Health(status="healthy", sessions=len(sessions), max_sessions=sessions.capacity)

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def render_metrics() -> Response:
        """Games, guesses, capacity and times in Prometheus' text format."""
        text = prometheus.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)


class _MoveRoute(APIRoute):
    """Reads and writes a move with pydantic alone: most requests are moves, and this halves their cost."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def play(request: Request) -> Response:
            started = time.perf_counter()
            try:
                session = UUID(request.path_params["session"])
            except ValueError:
                found = {"type": "uuid_parsing", "loc": ("path", "session"), "msg": "A session id is a UUID"}
                raise RequestValidationError([found]) from None
            try:
                guess = Guess.model_validate_json(await request.body())
            except ValidationError as error:
                problems = [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
                raise RequestValidationError(problems) from None
            answer = MOVE.dump_json(await self.endpoint(session, guess))
            request.app.state.metrics.move_took("http", time.perf_counter() - started)
            return Response(answer, media_type="application/json")

        return play


def _answer_problems(app: FastAPI) -> None:
    """Answer every refusal with a JSON object whose `detail` is a sentence that names the fix."""

    @app.exception_handler(GameError)
    async def refused(_: Request, error: GameError) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER_S} if error.status in (429, 503) else None
        return problem(error.status, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, f"{_explain(error.errors()[0])} GET /docs shows what to send.")

    @app.exception_handler(HTTPException)
    async def unroutable(_: Request, error: HTTPException) -> JSONResponse:
        sentence = error.detail
        if error.status_code == HTTPStatus.BAD_REQUEST:
            sentence = "The body could not be parsed; send a small JSON object."
        elif sentence == HTTPStatus(error.status_code).phrase:
            sentence = f"{sentence}: this path or method is not part of the API; GET /docs lists what is."
        return problem(error.status_code, sentence, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> JSONResponse:
        """The client is gone, but without an answer each client that hangs up would log a traceback."""
        return problem(400, "The body is incomplete; send the request again.")


def _explain(found: Mapping[str, Any]) -> str:
    if found["type"] == "json_invalid":
        return f"The body is not JSON ({found['ctx']['error']})."
    if found["loc"] == ("body",):
        return "The body must be a JSON object, sent as Content-Type: application/json."
    place, field, *_ = found["loc"]
    return f"The {place}'s '{field}' cannot be used: {found['msg'].removeprefix('Value error, ')}."


def server_options(key: str = "", games: int = 0, limits: Limits = LIMITS) -> dict[str, Any]:
    """uvicorn's options. The limit on connections without the key leaves room for two connections per game of
    `games`."""
    visitors = max(MAX_VISITORS, games)
    wanted = visitors + 2 * games
    connections = open_files(wanted + _SPARE_FILES) - _SPARE_FILES
    visitors = visitors * connections // wanted
    return {
        "http": limited_http(limits, visitors, key),
        "limit_concurrency": connections,
        # Shorter than the visitors' limit, so an accepted client is served before others evict it.
        "backlog": visitors // 2,
        "forwarded_allow_ips": PROXIES,
        "headers": [("Content-Security-Policy", FRAMING), ("Referrer-Policy", "no-referrer"), *SAFE_HEADERS],
        "access_log": False,
        "log_config": None,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": STOP_WITHIN_S,
        "ws_max_size": MAX_BODY_BYTES,
        "ws_per_message_deflate": False,
        "ws_ping_interval": PING_EVERY_S,
        "ws_ping_timeout": PING_TIMEOUT_S,
    }


def find_problems(environ: Mapping[str, str]) -> Problems:
    """What keeps a Space on the Hub with these variables from starting."""
    found = key_problem(environ, "WORDLE_KEY", "WORDLE_OPEN")
    try:
        rules_from(Settings.read(environ))
    except SettingsError as error:
        return found | error.problems
    except ValueError as error:  # there are fewer words than WORDLE_ANSWERS
        return found | {"WORDLE_ANSWERS": str(error).removesuffix(".")}
    return found


def main() -> None:
    """Serve with the settings in the environment, in one process, because games live in its memory. A Space
    that is not set up says so: on the Hub on its page, elsewhere as it exits."""
    log_as_json(LOG_LINES)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would name the replica at every move
    if "SPACE_ID" in os.environ and (problems := find_problems(os.environ)):
        _log.error(SETUP.sentence(problems))
        host, port = Settings.listen_address(os.environ)
        return serve(SETUP.app(problems), host=host, port=port, **server_options())
    try:
        settings = Settings.read(os.environ)
        app = create_app(settings)
    except ValueError as error:
        sys.exit(f"The Wordle Space cannot start: {error}")
    options = server_options(settings.required_key, settings.max_sessions)
    return serve(app, host=settings.host, port=settings.port, **options)


if __name__ == "__main__":
    main()
