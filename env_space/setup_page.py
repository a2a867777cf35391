"""What a Space shows that is not set up: the key it needs, and each variable that cannot be used.

A duplicated Space has its variables but not its secrets: this page is what its new owner sees first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from env_space.rules import rules_from
from env_space.settings import SettingsError, settings_from

Problems = Mapping[str, str]  # variable or secret -> a sentence that says what is wrong with it
SHORTEST_KEY = 16  # characters
WHERE = "Settings -> Variables and secrets"
_KEY = (
    "Opens the API: trainers send it from their variable SPACE_KEY. Visitors play on the page without it. To"
    " let everybody use the API, set the variable WORDLE_OPEN to true instead."
)
_NEW_KEY = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


def problems_of(environ: Mapping[str, str]) -> Problems:
    """What keeps a Space with these variables from starting; empty if nothing does."""
    found = _without_key(environ)
    try:
        rules_from(settings_from(environ))
    except SettingsError as error:
        return found | dict(error.problems)
    except ValueError as error:  # there are not so many words
        return found | {"WORDLE_ANSWERS": str(error)}
    return found


def _without_key(environ: Mapping[str, str]) -> dict[str, str]:
    key = environ.get("WORDLE_KEY", "")
    if not key and environ.get("WORDLE_OPEN", "").lower() != "true":
        return {"WORDLE_KEY": "WORDLE_KEY is not set."}
    if 0 < len(key) < SHORTEST_KEY:
        return {"WORDLE_KEY": f"WORDLE_KEY is shorter than {SHORTEST_KEY} characters; it could be guessed."}
    return {}


def sentence(problems: Problems) -> str:
    """All problems in one line, for logs and for programs."""
    return f"This Space is not set up; go to its {WHERE}. {' '.join(problems.values())}"


def create_app(problems: Problems) -> Starlette:
    """A Space that only says what it lacks: the page at /, and 503 for whatever wants a game."""

    async def home(request: Request) -> Response:
        return HTMLResponse(page(problems))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "not set up", "error": sentence(problems)})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": sentence(problems)}, 503)

    return Starlette(
        routes=[Route("/", home), Route("/health", health)],
        exception_handlers={404: refuse, 405: refuse},
    )


def page(problems: Problems) -> str:
    """The page. It asks for itself again, so it gives way to the game by itself."""
    space = escape(os.environ.get("SPACE_ID", ""), quote=True)
    where = f'<a href="https://huggingface.co/spaces/{space}/settings" target="_blank">{WHERE}</a>'
    items = "".join(_item(name, said) for name, said in problems.items())
    return _PAGE.format(where=where.replace("->", "→"), items=items)


def _item(name: str, said: str) -> str:
    kind, purpose, example = ("secret", _KEY, _NEW_KEY) if name == "WORDLE_KEY" else ("variable", "", "")
    rest = f"<p>{escape(purpose)}</p><pre>{escape(example)}</pre>" if purpose else ""
    title = f"<h2><code>{escape(name)}</code> <small>{kind}</small></h2>"
    return f'<li>{title}<p class="problem">{escape(said)}</p>{rest}</li>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="15">
<title>Set up this environment</title><style>
:root {{ --page: #f6f6f3; --card: #fff; --ink: #1b1d22; --mute: #5f6570; --rule: #dfdfd9; --bad: #b42318 }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #101216; --card: #181b21; --ink: #e9ebef;
  --mute: #9aa1ac; --rule: #2e333c; --bad: #ff8f85 }} }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }}
main {{ max-width: 44rem; margin: 0 auto; padding: 3rem 1.25rem }}
h1 {{ font-size: 1.6rem; margin: 0 0 .5rem }} a {{ color: inherit }} ul {{ list-style: none; padding: 0 }}
li {{ background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--bad);
  border-radius: 8px; padding: .75rem 1rem; margin: .75rem 0 }}
h2 {{ font-size: 1rem; margin: 0 }} small, li p {{ color: var(--mute); font-weight: normal }}
li p {{ margin: .25rem 0; overflow-wrap: anywhere }} li p.problem {{ color: var(--bad); font-weight: 600 }}
pre {{ margin: .5rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }}
</style></head><body><main>
<h1>This environment is not set up yet</h1>
<p>Set what is named here in {where} of this Space. It restarts by itself, and this page gives way to the
game.</p><ul>{items}</ul></main></body></html>
"""
