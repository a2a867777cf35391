"""Refusals of requests: JSON objects whose `detail` is a sentence that names the fix."""

from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse


class Problem(BaseModel):
    """Why a request was refused, and how to fix it."""

    detail: str


def problem(refusal: HTTPException) -> JSONResponse:
    """The answer to a refused request, as FastAPI writes it."""
    return JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the statuses with which a route may refuse, for FastAPI's description of the API."""
    return {status: {"model": Problem} for status in statuses}
