"""The routes that only read: the page for people, the words, health and metrics."""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from env_space.messages import Health, Words
from env_space.metrics import Metrics
from env_space.rules import Rules
from env_space.sessions import Sessions
from env_space.wordle import MAX_GUESSES

PAGE = Path(__file__).with_name("page")
# Nothing on the page comes from elsewhere, and nothing that a policy writes can run. Where it may be framed
# stands in the headers that the server sends with every answer.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'"}


class Pages:
    """What the service tells whoever looks at it."""

    def __init__(self, sessions: Sessions, rules: Rules, metrics: Metrics) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._words = Words(
            answers=rules.train + rules.held_out,
            held_out=rules.held_out,
            length=rules.length,
            max_guesses=MAX_GUESSES,
        )

    def route(self, app: FastAPI) -> None:
        """Offer the routes on `app`."""
        app.get("/", response_class=FileResponse, include_in_schema=False)(self.home)
        app.mount("/page", StaticFiles(directory=PAGE))
        app.get("/words")(self.words)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=Response, include_in_schema=False)(self.metrics)

    async def home(self) -> FileResponse:
        """The page where a person plays."""
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    async def words(self) -> Words:
        """Every word that can be the secret, in an order that is the same everywhere."""
        return self._words

    async def health(self) -> Health:
        """Whether the service is up, and how many games are in play."""
        return Health(status="healthy", sessions=len(self._sessions), max_sessions=self._sessions.capacity)

    async def metrics(self) -> Response:
        """Games, guesses, places and times in Prometheus' text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)
