"""What a Space shows that is not set up: each variable and secret it needs, what for, and where to set it.

A duplicated Space has its variables but not its secrets: this page is what its new owner sees first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_weight_sync.protocol import Keys, ProtocolError
from delta_weight_sync.store import BucketError, open_bucket
from inference_space.access import TOKENS
from inference_space.settings import SettingsError, settings_from

Problems = Mapping[str, str]  # variable or secret -> what is wrong with it
SHORTEST_KEY = 16  # characters
WHERE = "Settings -> Variables and secrets"


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
    ):
        try:
            check(value)
        except (BucketError, ProtocolError) as error:
            found[name] = str(error)
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


def create_app(problems: Problems) -> Starlette:
    """A Space that only says what it lacks: the page at /, and 503 for whatever wants a replica."""

    async def home(request: Request) -> Response:
        return HTMLResponse(page(problems))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "not set up", "error": sentence(problems)})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"state": "not set up", "error": sentence(problems)}, 503)

    return Starlette(
        routes=[Route("/", home), Route("/health", health)],
        exception_handlers={404: refuse, 405: refuse},
    )


class SetupPage:
    """ASGI middleware: the page in the place of / for as long as there are problems."""

    def __init__(self, app: ASGIApp, problems: Callable[[], Problems]) -> None:
        self._app, self._problems = app, problems

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] == "/" and (problems := self._problems()):
            return await HTMLResponse(page(problems))(scope, receive, send)
        return await self._app(scope, receive, send)


def page(problems: Problems) -> str:
    """The page. It asks for itself again, so it gives way to the dashboard by itself."""
    others = {name: Need("variable", "", "") for name in problems if name not in NEEDS}
    items = "".join(_item(name, need, problems.get(name)) for name, need in (NEEDS | others).items())
    space = escape(os.environ.get("SPACE_ID", ""), quote=True)
    where = f'<a href="https://huggingface.co/spaces/{space}/settings" target="_blank">{escape(WHERE)}</a>'
    return _PAGE.format(where=where.replace("-&gt;", "→"), items=items)


def _item(name: str, need: Need, problem: str | None) -> str:
    parts = (
        f'<p class="problem">{escape(problem)}</p>' if problem else "",
        f"<p>{escape(need.purpose)}</p>" if need.purpose else "",
        f"<pre>{escape(need.example)}</pre>" if problem and need.example else "",
    )
    mark = f'<li class="{"missing" if problem else "fine"}">'
    return f"{mark}<h2><code>{escape(name)}</code> <small>{need.kind}</small></h2>{''.join(parts)}</li>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="15">
<title>Set up this replica</title><style>
:root {{ --page: #f6f6f3; --card: #fff; --ink: #1b1d22; --mute: #5f6570; --rule: #dfdfd9; --bad: #b3261e;
  --ok: #1d7a46 }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #131417; --card: #1c1e22; --ink: #ececea;
  --mute: #a0a5ae; --rule: #33363c; --bad: #ff8a80; --ok: #6fd69b }} }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }}
main {{ max-width: 44rem; margin: 0 auto; padding: 3rem 1.25rem }}
h1 {{ font-size: 1.6rem; margin: 0 0 .5rem }} a {{ color: inherit }} ul {{ list-style: none; padding: 0 }}
li {{ background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--ok);
  border-radius: 8px; padding: .75rem 1rem; margin: .75rem 0 }}
li.missing {{ border-left-color: var(--bad) }} li p {{ margin: .25rem 0; color: var(--mute) }}
h2 {{ font-size: 1rem; margin: 0 }} small {{ color: var(--mute); font-weight: normal }}
li p.problem {{ color: var(--bad); font-weight: 600; overflow-wrap: anywhere }}
pre {{ margin: .5rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }}
</style></head><body><main>
<h1>This replica is not set up yet</h1>
<p>Set what is marked in red in {where} of this Space. It restarts by itself, and this page gives way to the
dashboard.</p><ul>{items}</ul></main></body></html>
"""
