"""The Hub's limit on requests for files: so many per token in a window; each answer tells what is left."""

import time
from collections import Counter

from pydantic import BaseModel
from starlette.types import Scope


class Limit(BaseModel, extra="forbid"):
    """Requests for files that a token has in a window; 0 = as many as it likes."""

    files: int = 0
    window_s: float = 300.0


class Limits:
    """Counts them, all of a token together whichever machine they come from."""

    def __init__(self) -> None:
        self.set(Limit())

    def set(self, limit: Limit) -> None:
        """From now on; the first window begins now."""
        self.limit, self._started = limit, time.monotonic()
        self._used: Counter[tuple[bytes, int]] = Counter()

    def take(self, scope: Scope) -> tuple[dict[str, str], bool]:
        """Count a request; the headers of its answer, and whether that is a refusal."""
        if not self.limit.files or "/resolve/" not in scope["path"]:
            return {}, False
        window, into = divmod(time.monotonic() - self._started, self.limit.window_s)
        who = dict(scope["headers"]).get(b"authorization", b""), int(window)
        self._used[who] += 1
        left = self.limit.files - self._used[who]
        policy = f'"fixed window";"resolvers";q={self.limit.files};w={self.limit.window_s:.0f}'
        told = f'"resolvers";r={max(left, 0)};t={self.limit.window_s - into:.0f}'
        return {"RateLimit": told, "RateLimit-Policy": policy}, left < 0
