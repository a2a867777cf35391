"""Games of Wordle over plain HTTP and over OpenEnv's WebSocket, and a page where a person plays."""

import asyncio
import logging
import os
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID, uuid4

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from env_space import openenv, pages, watch
from env_space.game import MAX_GUESSES, OPENING, GameError, Move, Rules, rules_from
from env_space.messages import MOVE, Closed, Guess, Opened, Opening, refusals
from env_space.sessions import Origin, Session, Sessions
from env_space.settings import PREFIX, Settings, settings_from
from env_space.watch import MAX_WATCHED, MAX_WATCHED_EACH
from space_guard.limits import PROXIES, Limits, client_address, limited_http, log_as_json
from space_guard.requests import FRAMING, KEY_HEADER, SAFE_HEADERS, BodyLimit, given_key, has_key, problem
from space_guard.setup import NEW_KEY, Need, Problems, SettingsError, Setup, key_problem, listen_address

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


def create_app(settings: Settings, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """The service with an empty store; games age by `clock`, in seconds.

    Raises:
        ValueError: The word list has fewer words than `settings.answers`.
    """
    rules, metrics = rules_from(settings), pages.Metrics()

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
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.state.metrics = metrics
    app.add_middleware(_KeyCheck, key=settings.required_key)
    _answer_problems(app)
    _add_games(app, sessions, rules, "/sessions", "http", True)
    _add_games(app, visitors, rules, "/play", "page", False)
    openenv.add_routes(app, sessions, rules, metrics.move_took)
    watch.add_route(app, watched, rules, settings)
    pages.add_routes(app, sessions, rules, metrics)
    return app


class _KeyCheck:
    """ASGI middleware: reading and the page's games are open, the API needs the key.

    Without a key everything is open, for a machine that is not reachable by others.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened = scope["type"] == "lifespan" or OPEN.fullmatch(scope["path"])
        if opened or has_key(self._key, scope["headers"]):
            return await self._app(scope, receive, send)
        refusal = problem(401, KEY_WRONG if given_key(scope["headers"]) else KEY_MISSING)
        if scope["type"] == "websocket":
            return await WebSocket(scope, receive, send).send_denial_response(refusal)
        return await refusal(scope, receive, send)


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
            hard_mode=rules.settings.hard_mode,
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
    connections = _open_files(wanted + _SPARE_FILES) - _SPARE_FILES
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


def _open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as it may. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def find_problems(environ: Mapping[str, str]) -> Problems:
    """What keeps a Space on the Hub with these variables from starting."""
    found = key_problem(environ, "WORDLE_KEY", "WORDLE_OPEN")
    try:
        rules_from(settings_from(environ))
    except SettingsError as error:
        return found | error.problems
    except ValueError as error:  # there are fewer words than WORDLE_ANSWERS
        return found | {"WORDLE_ANSWERS": str(error).removesuffix(".")}
    return found


def main() -> None:
    """Serve with the settings in the environment, in one process, because games live in its memory.

    A Space that is not set up says so: on the Hub on its page, elsewhere as it exits.
    """
    on_hub = "SPACE_ID" in os.environ
    if on_hub and (problems := find_problems(os.environ)):
        _log_as_json()
        _log.error(SETUP.sentence(problems))
        host, port = listen_address(Settings, PREFIX, os.environ)
        return uvicorn.run(SETUP.app(problems), host=host, port=port, **server_options())
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except ValueError as error:
        sys.exit(f"The Wordle Space cannot start: {error}")
    _log_as_json()
    options = server_options(settings.required_key, settings.max_sessions)
    return uvicorn.run(app, host=settings.host, port=settings.port, **options)


def _log_as_json() -> None:
    log_as_json(LOG_LINES)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would name the replica at every move


if __name__ == "__main__":
    main()
