"""Every refusal is a JSON object whose `detail` is a sentence that names the fix."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env_space.rules import SplitError
from env_space.sessions import ConflictError, FullError, SessionError, ShareError, UnknownSessionError
from env_space.watch import NoReplicaError
from env_space.wordle import GameOverError

STATUSES = {
    UnknownSessionError: 404,
    NoReplicaError: 404,
    ConflictError: 409,
    GameOverError: 409,
    SplitError: 422,
    ShareError: 429,
    FullError: 503,
}
RETRY_AFTER_S = 1  # a game takes seconds, and a place is free as soon as one ends


class BodyLimit:
    """Refuse a request body of more than `max_bytes` bytes without reading the rest of it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting the bytes that the application reads."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise HTTPException(413, f"The body is too large; send at most {self._max_bytes} bytes.")
            return message

        await self._app(scope, counted, send)


def answer_problems(app: FastAPI) -> None:
    """Make `app` answer what it refuses with a status below 500 (503 when full) and a Problem."""
    for refusal in (SessionError, GameOverError, SplitError, NoReplicaError):
        app.exception_handler(refusal)(_refused)
    app.exception_handler(RequestValidationError)(_malformed)
    app.exception_handler(HTTPException)(_unroutable)
    app.exception_handler(ClientDisconnect)(_left)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    full = isinstance(error, FullError | ShareError)
    return _problem(STATUSES[type(error)], str(error), {"Retry-After": str(RETRY_AFTER_S)} if full else None)


async def _left(_: Request, __: ClientDisconnect) -> JSONResponse:
    """Nobody is there to read it; without it each client that hangs up would leave a traceback in the log."""
    return _problem(400, "The body did not come whole; send the request again.")


async def _malformed(_: Request, error: RequestValidationError) -> JSONResponse:
    return _problem(422, f"{_explain(error.errors()[0])} GET /docs shows what to send.")


async def _unroutable(_: Request, error: HTTPException) -> JSONResponse:
    sentence = error.detail
    if error.status_code == HTTPStatus.BAD_REQUEST:
        sentence = "The body could not be parsed; send a small JSON object."
    elif sentence == HTTPStatus(error.status_code).phrase:
        sentence = f"{sentence}: this path or method is not part of the API; GET /docs lists what is."
    return _problem(error.status_code, sentence, error.headers)


def _explain(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"The body is not JSON ({problem['ctx']['error']})."
    if problem["loc"] == ("body",):
        return "The body must be a JSON object, sent as Content-Type: application/json."
    place, field, *_ = problem["loc"]
    return f"The {place}'s '{field}' cannot be used: {problem['msg'].removeprefix('Value error, ')}."


def _problem(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status, headers)
