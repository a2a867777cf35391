"""Decides when to look at a bucket again: after an interval, or as soon as a notification arrives.

If a store reports its changes (the Hub), a subclass of `Notifications` receives the reports; other stores are
polled. A poke is a request from outside that means "look now" and carries nothing else. After pokes have
caused `POKES` looks in a row, further pokes cause only one look per interval.

All replicas of a user share one quota of requests. The Hub counts requests in windows of five minutes. Each
answer says how many requests are left, and for how long. Requests of other replicas lower that number, too.
So all replicas slow down, enough for the quota to last for the rest of the window.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

MEASURED_S: Final = 5.0  # min seconds over which use is measured, because a version is a burst of requests
USED: Final = 0.8  # share of the remaining requests that polling may use; downloads need the rest
SLOWEST: Final = 60.0  # the longest interval, as a multiple of the usual interval
LONGEST_BLOCK_S: Final = 60.0  # longest wait after a refusal; some refusals ask for hours
_FIRST_BLOCK_S: Final = 2.0  # wait after a refusal that names no time; doubles with each further refusal
SAFETY_S = 60.0  # seconds between looks at a store that reports its changes, in case a notification gets lost
POKES: Final = 8  # looks that pokes may cause in a row; each interval allows one more
_EARLY = 0.1  # share of an interval by which a look may come too early


class Quota:
    """The requests that one token has left. Any thread may call the methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._slower = 1.0  # the interval, as a multiple of the usual interval
        self._last: tuple[float, int] | None = None  # time of the last count, and the requests left then
        self._refusals, self._open_at = 0, clock()

    def left(self, requests: int, seconds: float) -> None:
        """Note an answer: `requests` are left for the next `seconds`."""
        with self._lock:
            now, last = self._clock(), self._last
            self._refusals = 0
            if last is None or requests > last[1]:  # a new window
                self._last = now, requests
            elif (passed := now - last[0]) >= MEASURED_S:
                self._last = now, requests
                # Requests per second. A burst may distort `used`, so the next lines limit `change`.
                used, allowed = (last[1] - requests) / passed, USED * requests / max(seconds, 1.0)
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


class Notifications:
    """Notifications of changes below one folder. Thread-safe; only one thread calls `wait` and `due`."""

    def __init__(self, quota: Quota | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota, self._clock = quota or Quota(), clock
        self._changed = threading.Condition()
        self._awake = self._closed = False
        self._notified, self._poked, self._live = True, False, False
        self._settled = False  # whether a second look has followed the last notification
        self.known: dict[str, str] = {}  # key -> etag, as the last look found them
        self.prompted = False  # whether a report, a poke or `reset` asked for the last look
        self.for_safety = False  # whether the last look was only made in case a notification got lost
        self._looked = -math.inf
        self._interval = 1e-9  # seconds between two looks, at the last call of `due`
        # Each look after a poke moves this time on by one interval. Once this time is past, pokes may cause
        # `POKES` looks in a row again.
        self._poked_until = -math.inf

    def due(self, poll_s: float, again: bool = False) -> bool:
        """Whether to look now; True counts as a look.

        `poll_s`: usual seconds between two looks. `again`: the last look failed or must be repeated, so the
        next look comes after one interval, not later.
        """
        with self._changed:
            now, interval = self._clock(), self._quota.interval(poll_s)
            self._interval = max(interval, 1e-9)
            if self._quota.blocked_s():
                return False
            self.prompted = prompted = self._notified or (self._poked and self._may_answer(now))
            self._settled = self._settled and not again
            for_safety = self._live and self._settled and not prompted
            longest = max(SAFETY_S, interval) if for_safety else interval
            if not prompted and now + _EARLY * interval - self._looked < longest:
                return False
            if self._poked:
                self._poked_until = max(self._poked_until, now) + interval
            self.for_safety = for_safety
            # A reported change may become visible a moment later, so one more look will come soon.
            self._settled = not prompted
            self._notified, self._poked, self._looked = False, False, now
            return True

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a notification, a poke or `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._awake or self._closed, seconds)
            self._awake = False

    def poke(self) -> None:
        """Ask for a look on behalf of a caller outside this process."""
        with self._changed:
            self._poked = True
            if self._may_answer(self._clock()):  # otherwise the next usual look answers this poke
                self._awake = True
                self._changed.notify_all()

    def _may_answer(self, now: float) -> bool:
        return self._poked_until <= now + (POKES - 1 + _EARLY) * self._interval

    def wake(self) -> None:
        """Look now, because the store reported a change. From now on, rely on its reports."""
        with self._changed:
            self._notified = self._awake = self._live = True
            self._changed.notify_all()

    def confirm(self) -> None:
        """Note that the last look found a change. If this look was only for safety, a notification got lost:
        poll until the next notification arrives."""
        if self.for_safety:
            self._set_live(False)

    def reset(self) -> None:
        """Make the next look due without waking anyone."""
        with self._changed:
            self._notified = True

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

    def _set_live(self, live: bool) -> None:
        """Set whether to rely on the store to report each change."""
        with self._changed:
            self._live = live
