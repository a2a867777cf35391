"""Games of Wordle over plain HTTP and over OpenEnv's WebSocket, and a page where a person plays."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from env_space import setup_page
from env_space.games import Games
from env_space.keys import AT_ONCE, KeyCheck
from env_space.logs import log_as_json, log_game
from env_space.metrics import Metrics, MoveTimer
from env_space.openenv import routes as openenv
from env_space.pages import Pages
from env_space.problems import BodyLimit, answer_problems
from env_space.rules import rules_from
from env_space.sessions import Session, Sessions
from env_space.settings import Settings, settings_from
from env_space.watch import Watch

MAX_BODY_BYTES = 16 * 1024
REAP_EVERY_S = 5.0
KEEP_ALIVE_S = 120  # a policy thinks for seconds between two moves on one connection
STOP_WITHIN_S = 10
# A client may be busy with a training step for minutes. Games expire by themselves; this only frees sockets.
PING_EVERY_S, PING_PATIENCE_S = 30, 300

_log = logging.getLogger("wordle")


def create_app(settings: Settings, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """The service with an empty store, whose games age by `clock`.

    Raises ValueError if `settings.answers` is more than there are.
    """
    rules = rules_from(settings)
    metrics = Metrics()

    def ended(session: Session) -> None:
        metrics.count_game(session)
        log_game(session)

    sessions = Sessions(settings.max_sessions, settings.session_ttl_s, ended, clock)
    visitors = Sessions(AT_ONCE, settings.session_ttl_s, ended, clock, more="")
    metrics.watch_sessions(sessions.__len__, sessions.capacity)
    app = FastAPI(title="Wordle environment", description=__doc__, lifespan=_reaping(sessions, visitors))
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(MoveTimer, metrics=metrics)
    app.add_middleware(KeyCheck, key="" if settings.open else settings.key)
    answer_problems(app)
    Games(sessions, rules).route(app)
    Games(visitors, rules, via="page").route(app, "/play", documented=False)
    openenv.route(app, sessions, rules, metrics)
    Watch(visitors, rules, settings).route(app)
    Pages(sessions, rules, metrics).route(app)
    return app


def _reaping(*stores: Sessions) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(_reap_forever(stores))
        yield
        reaper.cancel()
        _log.info("stopped with %d games in play", sum(map(len, stores)))

    return lifespan


async def _reap_forever(stores: Iterable[Sessions]) -> None:
    """Every request reaps too; this frees the memory while none comes."""
    while True:
        await asyncio.sleep(REAP_EVERY_S)
        for sessions in stores:
            sessions.reap()


def main() -> None:
    """Serve with the settings of the environment, in one process: the games live in its memory.

    Where it is not set up, it says so: on the Hub on its page, elsewhere as it ends.
    """
    if "SPACE_ID" in os.environ and (problems := setup_page.problems_of(os.environ)):
        log_as_json()
        _log.error(setup_page.sentence(problems))
        return _serve(setup_page.create_app(problems), *_address(os.environ))
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except ValueError as error:
        sys.exit(f"The Wordle Space cannot start. {error}")
    log_as_json()
    return _serve(app, settings.host, settings.port)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the settings as a whole cannot be used."""
    default, port = Settings.model_fields, environ.get("WORDLE_PORT", "")
    return (
        environ.get("WORDLE_HOST", default["host"].default),
        int(port) if port.isdecimal() else default["port"].default,
    )


def _serve(app: ASGIApp, host: str, port: int) -> None:
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_WITHIN_S,
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PING_PATIENCE_S,
    )


if __name__ == "__main__":
    main()
