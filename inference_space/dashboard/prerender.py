"""What a visitor sees first: the run as it is now, inside the page's own answer.

Gradio's page is empty until its scripts have been fetched and run. So it gets the styles, the scripts and the
rendered run put into it; `static/prerender.js` takes the run away once Gradio shows it itself. The page is
made and packed once for all visitors of a revision, whoever they are and by whichever name they came.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_space.dashboard.data import RunView
from inference_space.dashboard.static_files import STATIC, scripts, styles
from inference_space.headers import FRAMED

_NAME = (
    "dashboard.invalid"  # Gradio writes the name by which it was asked into its page; a browser knows it, too
)


class Prerender:
    """ASGI middleware around the app that holds the dashboard; it answers for the page itself.

    `view` returns what is to be seen, at once, and `paint` the HTML to begin with.
    """

    def __init__(self, app: ASGIApp, view: Callable[[], RunView], paint: Callable[[RunView], str]) -> None:
        self._app, self._view, self._paint = app, view, paint
        self._frame: str | None = None  # Gradio's page
        self._newest: tuple[int, _Page] | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        zipped = "gzip" in Headers(scope=scope).get("accept-encoding", "")
        page = await self._page(scope)
        return await page.answer(zipped=zipped)(scope, receive, send)

    async def _page(self, scope: Scope) -> _Page:
        async with self._making:
            view = self._view()
            if self._newest is None or self._newest[0] != view.revision:
                self._frame = self._frame or await _frame(self._app, scope)
                self._newest = view.revision, await run_in_threadpool(self._make, self._frame, view)
            return self._newest[1]

    def _make(self, frame: str, view: RunView) -> _Page:
        plain = put_into(frame, self._paint(view)).encode()
        return _Page(plain, gzip.compress(plain, 6), policy(put_into(frame, "")))


@dataclass(frozen=True)
class _Page:
    plain: bytes
    zipped: bytes
    policy: str

    def answer(self, *, zipped: bool) -> Response:
        headers = {"vary": "accept-encoding", "content-security-policy": self.policy}
        if zipped:
            headers["content-encoding"] = "gzip"
        return Response(self.zipped if zipped else self.plain, headers=headers, media_type="text/html")


async def _frame(app: ASGIApp, scope: Scope) -> str:
    """Gradio's page, as it would be under any name; raises `ValueError` if there is none."""
    body = bytearray()

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def take(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    asked = {"method": "GET", "query_string": b"", "headers": [(b"host", _NAME.encode())], "scheme": "http"}
    await app({**scope, **asked}, nothing, take)
    frame = body.decode().replace(f'"http://{_NAME}"', "location.origin")
    put_into(frame, "")
    return frame


def put_into(page: str, painted: str) -> str:
    """Gradio's page with ours in it; raises `ValueError` where it is not the page we know."""
    head, closed, rest = page.partition("</head>")
    before, opened, after = rest.partition("<gradio-app")
    if not (closed and opened) or _NAME in page:
        raise ValueError("Gradio's page is not the one that the dashboard was built for: use gradio==6.31.0")
    first = (STATIC / "prerender.js").read_text()
    ours = f"{painted}<script>{first}</script><script>{scripts()}</script>"
    return f"{head}<style>{styles()}</style>{closed}{before}{ours}{opened}{after}"


def policy(page: str) -> str:
    """What a browser may do with the page: run its own scripts, and speak to nobody but this server.

    `page` has nothing of a run in it: a script that came in with a run's data is not among those that may
    run. Gradio compiles its templates in the browser, which browsers call `eval`.
    """
    inline = re.findall(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", page, re.DOTALL)
    known = " ".join(sorted({f"'sha256-{_sha256(text)}'" for text in inline}))
    return (
        f"default-src 'self'; script-src 'self' 'unsafe-eval' {known}; style-src 'self' 'unsafe-inline';"
        f" img-src 'self' data:; font-src 'self' data:; object-src 'none'; base-uri 'self'; {FRAMED}"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
