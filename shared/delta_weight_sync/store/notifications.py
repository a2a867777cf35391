"""Decides when to look at a bucket again: after an interval, or as soon as a notification arrives.

If a store reports its changes (the Hub), a subclass of `Notifications` receives the reports; other stores are
polled. A poke is a request from outside that means "look now" and carries nothing else. Pokes may cause
`POKES` looks in a row; each interval allows one more.

All replicas of a user share one quota of requests. The Hub counts requests in windows of five minutes. Each
answer says how many requests are left, and for how long. Requests of other replicas lower that number, too.
So all replicas slow down, enough for the quota to last for the rest of the window.
"""

import math
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

MEASURED_S: Final = 5.0  # min seconds over which use is measured, because a version is a burst of requests
USED: Final = 0.8  # share of the remaining requests that polling may use; downloads need the rest
SLOWEST: Final = 60.0  # the longest interval, as a multiple of the usual interval
LONGEST_BLOCK_S: Final = 60.0  # longest wait after a refusal; some refusals ask for hours
_FIRST_BLOCK_S: Final = 2.0  # wait after a refusal that names no time; doubles with each further refusal
SAFETY_S = 60.0  # seconds between looks at a store that reports its changes, in case a notification gets lost
POKES: Final = 8  # looks that pokes may cause in a row; each interval allows one more


class Quota:
    """The requests that one token has left. Any thread may call the methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._slower = 1.0  # the interval, as a multiple of the usual interval
        self._last: tuple[float, int] | None = None  # time of the last count, and the requests left then
        self._refusals = 0
        self._open_at = clock()

    def left(self, requests: int, seconds: float) -> None:
        """Note an answer: `requests` are left for the next `seconds`."""
        with self._lock:
            now = self._clock()
            last = self._last
            self._refusals = 0
            if last is None or requests > last[1]:  # a new window
                self._last = now, requests
            elif (passed := now - last[0]) >= MEASURED_S:
                self._last = now, requests
                # Requests per second. A burst may distort `used`, so the next lines limit `change`.
                used = (last[1] - requests) / passed
                allowed = USED * requests / max(seconds, 1.0)
                change = used / allowed if allowed else SLOWEST
                self._slower = min(max(self._slower * min(max(change, 0.5), 4.0), 1.0), SLOWEST)

    def refused(self, seconds: float | None) -> None:
        """Note a refusal: the quota is used up for `seconds`; None if the answer named no time."""
        with self._lock:
            self._refusals += 1
            wait = _FIRST_BLOCK_S * 2 ** min(self._refusals - 1, 5) if seconds is None else seconds
            self._open_at = self._clock() + min(wait, LONGEST_BLOCK_S)

    def blocked_s(self) -> float:
        """Seconds until the quota allows requests again; 0 if it allows them now."""
        with self._lock:
            return max(self._open_at - self._clock(), 0.0)

    def interval(self, poll_s: float) -> float:
        """Seconds between two looks; `poll_s` if the quota is large enough."""
        with self._lock:
            return poll_s * self._slower


class Why(Enum):
    """Why it is time to look at the bucket."""

    NOTIFIED = "the store reported a change, or somebody asked for a look"
    INTERVAL = "an interval has passed, or a failed look is repeated"
    SAFETY = "a notification may have got lost"


class Notifications:
    """When to look at one folder of a bucket, and why. Thread-safe; only one thread calls `wait` and `due`.

    There is one next look. Reports of the store, pokes and retries only move it to an earlier time.
    """

    def __init__(self, quota: Quota | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota or Quota()
        self._clock = clock
        self._changed = threading.Condition()
        self._awake = self._closed = False
        self._live = False  # whether the store reports each change now
        self._looked = -math.inf
        self._next = -math.inf
        self._why = Why.NOTIFIED
        self._interval = 0.0  # seconds between two looks, as at the last look
        self._poked = False  # whether a poke asked for the next look
        # Each look after a poke moves this time on by one interval. It may be `POKES` intervals ahead.
        self._poked_until = -math.inf
        self.known: dict[str, str] = {}  # key -> etag, as the last look found them

    def due(self, poll_s: float) -> Why | None:
        """Why to look now, or None if it is too early. A reason counts as a look, and plans the next look.

        `poll_s`: usual seconds between two looks.
        """
        with self._changed:
            now = self._clock()
            why = self._why
            if now < self._next or self._quota.blocked_s():
                return None
            self._looked, self._interval = now, self._quota.interval(poll_s)
            if self._poked:
                self._poked_until = max(self._poked_until, now) + self._interval
            # A reported change may become visible a moment later, so one more look comes soon.
            if self._live and why is not Why.NOTIFIED:
                self._plan(now + max(SAFETY_S, self._interval), Why.SAFETY)
            else:
                self._plan(now + self._interval, Why.INTERVAL)
            return why

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a report of the store, a poke or `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._awake or self._closed, seconds)
            self._awake = False

    def look_now(self) -> None:
        """Make the next look due, without waking anyone."""
        with self._changed:
            self._plan(self._clock(), Why.NOTIFIED)

    def report(self) -> None:
        """Look now, because the store reported a change. From now on, rely on its reports."""
        with self._changed:
            self._live = True
            self._plan(self._clock(), Why.NOTIFIED)
            self._wake()

    def poke(self) -> None:
        """Look on behalf of a caller outside this process, as soon as the limit of pokes allows it."""
        with self._changed:
            now = self._clock()
            allowed = max(now, self._poked_until - (POKES - 1) * self._interval)
            if allowed <= max(now, self._next):
                self._plan(allowed, Why.NOTIFIED, poked=True)
            if allowed == now:
                self._wake()

    def retry(self, seconds: float) -> None:
        """Look again in `seconds`, but not before an interval has passed."""
        with self._changed:
            at = max(self._clock() + seconds, self._looked + self._interval)
            if at < self._next:
                self._plan(at, Why.INTERVAL)

    def rely(self, live: bool) -> None:
        """Set whether to rely on the store to report each change, or to poll."""
        with self._changed:
            self._live = live
            if not live and self._why is Why.SAFETY:
                self._plan(self._looked + self._interval, Why.INTERVAL)

    def close(self) -> None:
        """End all waits, also future ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def describe(self, poll_s: float) -> str:
        """Describe in words how changes are noticed now."""
        if blocked_s := self._quota.blocked_s():
            return f"paused for {blocked_s:.0f} s: the store refused further requests with this token"
        if self._live:
            return "notified by the store"
        interval = self._quota.interval(poll_s)
        slower = f", so that the token's quota of requests lasts; usual is {poll_s:g} s"
        return f"polls every {interval:.4g} s" + (slower if interval > poll_s else "")

    def _plan(self, at: float, why: Why, poked: bool = False) -> None:
        self._next = at
        self._why = why
        self._poked = poked

    def _wake(self) -> None:
        self._awake = True
        self._changed.notify_all()
