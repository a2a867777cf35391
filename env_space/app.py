"""Games of Wordle over plain HTTP and over OpenEnv's WebSocket, and a page where a person plays."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from fastapi import FastAPI

from env_space import setup_page
from env_space.games import Games
from env_space.keys import AT_ONCE, EACH, KeyCheck
from env_space.logs import log_as_json, log_game
from env_space.metrics import Metrics, MoveTimer
from env_space.openenv import routes as openenv
from env_space.pages import Pages
from env_space.problems import BodyLimit, answer_problems
from env_space.rules import rules_from
from env_space.server import MAX_BODY_BYTES, serve
from env_space.sessions import Session, Sessions
from env_space.settings import Settings, settings_from
from env_space.watch import EACH_WATCHED, MAX_WATCHED, Watch

REAP_EVERY_S = 5.0

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
    # Those of visitors are counted and not logged, so that nobody without the key can fill the log.
    of_visitors = partial(
        Sessions, ttl_s=settings.session_ttl_s, on_end=metrics.count_game, clock=clock, more=""
    )
    visitors, watched = of_visitors(AT_ONCE, each=EACH), of_visitors(MAX_WATCHED, each=EACH_WATCHED)
    metrics.watch_sessions(sessions.__len__, sessions.capacity)
    lifespan = _reaping(sessions, visitors, watched)
    app = FastAPI(title="Wordle environment", description=__doc__, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(MoveTimer, metrics=metrics)
    app.add_middleware(KeyCheck, key=settings.asked_key)
    answer_problems(app)
    Games(sessions, rules).route(app)
    Games(visitors, rules, via="page").route(app, "/play", documented=False)
    openenv.route(app, sessions, rules, metrics)
    Watch(watched, rules, settings).route(app)
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
        return serve(setup_page.create_app(problems), *_address(os.environ))
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except ValueError as error:
        sys.exit(f"The Wordle Space cannot start. {error}")
    log_as_json()
    return serve(app, settings.host, settings.port, settings.asked_key, settings.max_sessions)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the settings as a whole cannot be used."""
    default, port = Settings.model_fields, environ.get("WORDLE_PORT", "")
    return (
        environ.get("WORDLE_HOST", default["host"].default),
        int(port) if port.isdecimal() else default["port"].default,
    )


if __name__ == "__main__":
    main()
