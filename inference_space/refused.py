"""The answer to a request that goes no further: a sentence with the fix, as OpenAI's clients expect it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse


class Refused(Exception):  # noqa: N818 - it is an answer, not a fault
    """The request gets this answer and goes no further."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        error = {"message": sentence, "type": "refused", "code": status}
        self.answer = JSONResponse({"error": error}, status, headers)


def come_back(sentence: str) -> Refused:
    """It may have its answer later."""
    return Refused(429, f"{sentence}; try again in a moment", {"Retry-After": "1"})
