"""What a visitor sees first: the run as it is now, inside the page's own answer.

Gradio's page is empty until its scripts have been fetched and run. So its answer gets the styles, the scripts
and the rendered run put into it on its way out; `static/prerender.js` takes the run away once Gradio shows it
itself.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_space.dashboard.static_files import STATIC, scripts, styles


class Prerender:
    """ASGI middleware around the app that holds the dashboard; all answers but the page's pass through it.

    `paint` returns the HTML to begin with. It must not wait: nobody sees anything before it returns.
    """

    def __init__(self, app: ASGIApp, path: str, paint: Callable[[], str]) -> None:
        self._app, self._path, self._paint = app, f"{path.rstrip('/')}/", paint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != self._path:
            await self._app(scope, receive, send)
            return
        accepted = Headers(scope=scope).get("accept-encoding", "")
        plain = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        answer = _Answer()
        await self._app({**scope, "headers": plain}, receive, answer.take)
        if answer.is_page:
            painted = await run_in_threadpool(self._paint)
            answer.replace(put_into(answer.body.decode(), painted), zipped="gzip" in accepted)
        await answer.send(send)


class _Answer:
    """An answer that is held back until it is complete."""

    def __init__(self) -> None:
        self._start: Message = {}
        self.body = b""

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self.body += message.get("body", b"")

    @property
    def is_page(self) -> bool:
        kind = Headers(raw=self._start["headers"]).get("content-type", "")
        return self._start["status"] == 200 and kind.startswith("text/html")

    def replace(self, page: str, *, zipped: bool) -> None:
        headers = MutableHeaders(raw=self._start["headers"])
        self.body = gzip.compress(page.encode(), 5) if zipped else page.encode()
        if zipped:
            headers["content-encoding"] = "gzip"
        headers.add_vary_header("accept-encoding")
        headers["content-length"] = str(len(self.body))
        self._start["headers"] = headers.raw

    async def send(self, send: Send) -> None:
        await send(self._start)
        await send({"type": "http.response.body", "body": self.body})


def put_into(page: str, painted: str) -> str:
    """Gradio's page with ours in it; raises `ValueError` where it is not the page we know."""
    head, closed, rest = page.partition("</head>")
    before, opened, after = rest.partition("<gradio-app")
    if not (closed and opened):
        raise ValueError("Gradio's page is not the one that the dashboard was built for: use gradio==6.31.0")
    first = (STATIC / "prerender.js").read_text()
    ours = f"{painted}<script>{first}</script><script>{scripts()}</script>"
    return f"{head}<style>{styles()}</style>{closed}{before}{ours}{opened}{after}"
