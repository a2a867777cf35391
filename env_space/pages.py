"""The routes that only read: the page for people, the words, health, and metrics for Prometheus."""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from env_space.game import MAX_GUESSES, Rules
from env_space.messages import Health, Words
from env_space.sessions import Session, Sessions

PAGE = Path(__file__).with_name("page")
# The page loads nothing from other sites, and no text of a policy can run as a script.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'"}
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """The counters of one service. Games and guesses are counted when their game ends."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = ["outcome", "split", "via"]
        self._games = Counter("wordle_games", "Games that ended", labels, registry=registry)
        self._guesses = Counter("wordle_guesses", "Guesses played", ["kind"], registry=registry)
        self.active = Gauge("wordle_active_sessions", "Games in play", registry=registry)
        self.capacity = Gauge("wordle_max_sessions", "Games that may be in play", registry=registry)
        about = "From a move's request being read to its answer being written"
        seconds = Histogram("wordle_move_seconds", about, ["via"], buckets=_BUCKETS_S, registry=registry)
        self._took = {via: seconds.labels(via).observe for via in ("http", "ws")}

    def count_game(self, session: Session) -> None:
        """Count a game that ended."""
        origin, game = session.origin, session.game
        self._games.labels(session.outcome, origin.split, origin.via).inc()
        self._guesses.labels("invalid").inc(game.invalid)
        self._guesses.labels("repeated").inc(game.repeated)
        self._guesses.labels("new").inc(game.turns - game.invalid - game.repeated)

    def move_took(self, via: str, seconds: float) -> None:
        """Record the time of one move."""
        self._took[via](seconds)


def add_routes(app: FastAPI, sessions: Sessions, rules: Rules, metrics: Metrics) -> None:
    """Add the routes to `app`."""
    words = Words(
        answers=rules.train + rules.held_out,
        held_out=rules.held_out,
        length=rules.settings.length,
        max_guesses=MAX_GUESSES,
    )
    metrics.active.set_function(sessions.__len__)
    metrics.capacity.set(sessions.capacity)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", response_class=FileResponse, include_in_schema=False)
    async def home() -> FileResponse:
        """The page where a person plays."""
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
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
