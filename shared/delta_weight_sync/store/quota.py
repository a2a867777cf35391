"""How often to look, where all replicas of a user share one quota of requests and none knows of the others.

The Hub counts requests in windows of five minutes and says in each answer how many are left for how long.
What others use shows in that number, too: so each replica slows down by the same factor, until what is left
lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

MEASURED_S: Final = 5.0  # at least between two numbers that are compared: a version is a burst of requests
USED: Final = 0.8  # share of what is left that looking may use; the rest is for the versions themselves
SLOWEST: Final = 60.0  # times the usual interval
LONGEST_BLOCK_S: Final = 60.0  # that a refusal is believed: some name hours
_FIRST_BLOCK_S: Final = 2.0  # after a refusal that names no time; doubled with each one that follows


class _Left(NamedTuple):
    at: float
    requests: int


class Quota:
    """Told of every answer by one thread, asked by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._slower = 1.0  # times the usual interval
        self._last: _Left | None = None
        self._refusals, self._open_at = 0, clock()

    def left(self, requests: int, seconds: float) -> None:
        """An answer said that so many requests are left for so long."""
        with self._lock:
            now, last = self._clock(), self._last
            self._refusals = 0
            if last and requests <= last.requests and now - last.at < MEASURED_S:
                return
            self._last = _Left(now, requests)
            if last and requests <= last.requests:  # in the same window
                used = (last.requests - requests) / (now - last.at)
                allowed = USED * requests / max(seconds, 1.0)
                change = used / allowed if allowed else SLOWEST
                self._slower = min(max(self._slower * min(max(change, 0.5), 4.0), 1.0), SLOWEST)

    def refused(self, seconds: float | None) -> None:
        """The quota is used up; it is open again in so many seconds, if that was said."""
        with self._lock:
            self._refusals += 1
            wait = _FIRST_BLOCK_S * 2 ** min(self._refusals - 1, 5) if seconds is None else seconds
            self._open_at = self._clock() + min(wait, LONGEST_BLOCK_S)

    def blocked_s(self) -> float:
        """For how long no request makes sense; 0 where one does."""
        with self._lock:
            return max(self._open_at - self._clock(), 0.0)

    def interval(self, poll_s: float) -> float:
        """Seconds between two looks, where `poll_s` would be usual."""
        with self._lock:
            return poll_s * self._slower
