"""What `GET /metrics` tells Prometheus: games, guesses, how long a move takes, places taken, the process."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from env_space.sessions import Session

MOVE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def outcome(session: Session) -> str:
    """How a game ended: solved, lost, expired, or gave_up by closing it."""
    if session.game.solved:
        return "solved"
    if session.expired:
        return "expired"
    return "gave_up" if session.game.gave_up else "lost"


class Metrics:
    """The counters of one service. Games and guesses are counted as their game ends."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._games = Counter(
            "wordle_games", "Games that ended", ["outcome", "split", "via"], registry=self._registry
        )
        self._guesses = Counter("wordle_guesses", "Guesses played", ["kind"], registry=self._registry)
        self._active = Gauge("wordle_active_sessions", "Games in play", registry=self._registry)
        self._places = Gauge("wordle_max_sessions", "Games that may be in play", registry=self._registry)
        self._seconds = Histogram(
            "wordle_move_seconds",
            "From a move's request being read to its answer being written",
            ["via"],
            buckets=MOVE_BUCKETS_S,
            registry=self._registry,
        )
        self._took = {via: self._seconds.labels(via).observe for via in ("http", "ws")}

    def watch_sessions(self, active: Callable[[], int], places: int) -> None:
        """Report the number of games in play at the time of each scrape."""
        self._active.set_function(active)
        self._places.set(places)

    def count_game(self, session: Session) -> None:
        """Take in a game that ended."""
        origin, tally, turns = session.origin, session.game.tally, session.game.turns
        self._games.labels(outcome(session), origin.split, origin.via).inc()
        self._guesses.labels("invalid").inc(tally.invalid)
        self._guesses.labels("repeated").inc(tally.repeated)
        self._guesses.labels("new").inc(turns - tally.invalid - tally.repeated)

    def move_took(self, via: str, seconds: float) -> None:
        """Take in how long one move took."""
        self._took[via](seconds)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class MoveTimer:
    """Times every request that plays a move over HTTP, its reading and writing included."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not scope["path"].endswith("/guess"):
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        await self._app(scope, receive, send)
        return self._metrics.move_took("http", time.perf_counter() - started)
