"""Checks the calls of the dashboard's events, so that only texts reach Gradio.

In place of any value, Gradio also accepts an object that describes a file. Gradio then fetches this file with
this machine's access.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from space_guard.guard import read_body, replay

PATH = "/gradio_api/run/predict"
MAX_BODY = 16 << 10
MAX_TEXT = 1024  # characters of an event's value


class _Call(BaseModel, strict=True):
    fn_index: int
    data: list[Annotated[str, Field(max_length=MAX_TEXT)] | None]
    session_hash: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    trigger_id: int | None = None


def check_calls(app: ASGIApp, events: Mapping[int, int]) -> ASGIApp:
    """ASGI middleware: passes calls of `events` with their known fields only, and refuses all other requests
    for `PATH`. `events` maps the number of each event to how many inputs it has."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            return await app(scope, receive, send)
        try:
            body = _checked(dict(scope["headers"]), await read_body(receive, MAX_BODY), events)
        except HTTPException as refusal:
            text = PlainTextResponse(refusal.detail, refusal.status_code, refusal.headers)
            return await text(scope, receive, send)
        return await app(scope, replay(body, receive), send)

    return answer


def _checked(headers: Mapping[bytes, bytes], body: bytes, events: Mapping[int, int]) -> bytes:
    # Only JSON, so that no page of another site can send a call through a visitor's browser: the browser
    # would first ask with OPTIONS whether it may send JSON.
    if not headers.get(b"content-type", b"").startswith(b"application/json"):
        raise HTTPException(415, "The body must be JSON: send it with Content-Type: application/json.")
    with suppress(ValidationError):
        call = _Call.model_validate_json(body)
        if events.get(call.fn_index) == len(call.data):
            return call.model_dump_json().encode()
    problem = "The request is not one of the dashboard's events, or its page is out of date"
    raise HTTPException(422, f"{problem}: reload the page.")
