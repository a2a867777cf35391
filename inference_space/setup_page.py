"""What a Space shows that is not set up: each variable and secret it needs, what for, and where to set it.

A duplicated Space has its variables but not its secrets: this page is what its new owner sees first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_weight_sync.keys import Keys
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys
from delta_weight_sync.store import BucketError, open_bucket
from delta_weight_sync.vllm.settings import NOT_HERE
from inference_space.access import TOKENS
from inference_space.dashboard.templates import render_template
from inference_space.headers import FRAMED
from inference_space.settings import SettingsError, settings_from

Problems = Mapping[str, str]  # variable or secret -> what is wrong with it
SHORTEST_KEY = 16  # characters
WHERE = "Settings → Variables and secrets"
_POLICY = {"content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; {FRAMED}"}


@dataclass(frozen=True)
class Need:
    """A variable or a secret of the Space."""

    kind: str
    purpose: str
    example: str


NEEDS = {
    "REPLICA_BUCKET": Need(
        "variable", "The bucket to which the trainer publishes weights.", "hf://buckets/<owner>/<name>"
    ),
    "REPLICA_RUN": Need("variable", "The run in that bucket which this replica follows.", "first"),
    "REPLICA_KEY": Need(
        "secret",
        "Opens inference and the owner's controls. Trainers send it from their variable SPACE_KEY. To let"
        " everybody use this hardware, set the variable REPLICA_OPEN_INFERENCE to true instead.",
        "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
    ),
    PUBLIC_KEY: Need(
        "variable",
        "Optional: the public half of the trainer's key. Versions that it has not signed are refused.",
        "ed25519_public_<64 hex digits>",
    ),
    "HF_TOKEN": Need(
        "secret",
        "Reads the bucket where that is private. Read access to this one bucket is enough: the replica never"
        " writes.",
        TOKENS,
    ),
}


def problems_of(environ: Mapping[str, str]) -> Problems:
    """What keeps a Space with these variables from starting; empty if nothing does."""
    found = _without_key(environ)
    try:
        settings = settings_from(environ)
    except SettingsError as error:
        return found | dict(error.problems)
    for name, check, value in (
        ("REPLICA_BUCKET", open_bucket, settings.bucket),
        ("REPLICA_RUN", Keys, settings.run),
        (PUBLIC_KEY, PublicKeys, environ.get(PUBLIC_KEY, "")),
    ):
        try:
            check(value)
        except (BucketError, ProtocolError) as error:
            found[name] = str(error)
    if environ.get(SIGNING_KEY):
        found[SIGNING_KEY] = NOT_HERE
    return found


def _without_key(environ: Mapping[str, str]) -> dict[str, str]:
    key = environ.get("REPLICA_KEY", "")
    if not key and environ.get("REPLICA_OPEN_INFERENCE", "").lower() != "true":
        return {"REPLICA_KEY": "not set"}
    if 0 < len(key) < SHORTEST_KEY:
        return {"REPLICA_KEY": f"shorter than {SHORTEST_KEY} characters, it could be guessed"}
    return {}


def sentence(problems: Problems) -> str:
    """All problems in one line, for logs and for programs."""
    every = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return f"this Space is not set up, go to its {WHERE}: {every}"


def create_app(problems: Problems) -> ASGIApp:
    """A Space that only says what it lacks: the page at /, and 503 for whatever wants a replica."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "not set up", "error": sentence(problems)})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"state": "not set up", "error": sentence(problems)}, 503)

    refusals = {404: refuse, 405: refuse}
    return SetupPage(
        Starlette(routes=[Route("/health", health)], exception_handlers=refusals), lambda: problems
    )


class SetupPage:
    """ASGI middleware: the page in the place of / for as long as there are problems."""

    def __init__(self, app: ASGIApp, problems: Callable[[], Problems]) -> None:
        self._app, self._problems = app, problems

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] == "/" and (problems := self._problems()):
            return await HTMLResponse(page(problems), headers=_POLICY)(scope, receive, send)
        return await self._app(scope, receive, send)


def page(problems: Problems) -> Markup:
    """The page. It asks for itself again, so it gives way to the dashboard by itself."""
    needs = NEEDS | {name: Need("variable", "", "") for name in problems if name not in NEEDS}
    space = os.environ.get("SPACE_ID", "")
    return render_template("setup.html", needs=needs, problems=problems, space=space, where=WHERE)
