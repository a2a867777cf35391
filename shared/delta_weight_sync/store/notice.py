"""When to look at a bucket again: after a while, and at once where something tells of a change.

A store that can tell (the Hub) has a `Notice` of its own; for the others this one goes by the clock. Whoever
runs the program that looks can `poke` it: that means "look now" and says nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from delta_weight_sync.store.quota import Quota

SAFETY_S = 60.0  # between two looks at a store that tells of changes, as what it tells may get lost
_EARLY = 0.1  # of an interval: a turn that comes so much too early is not put off until the next one


class Notice:
    """Of the changes below one folder of a bucket. One thread waits and looks; any may call the rest."""

    def __init__(self, quota: Quota | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota, self._clock = quota or Quota(), clock
        self._rung = threading.Condition()
        self._ringing = self._closed = False
        self._told, self._poked, self._live = True, False, False
        self._sure = False  # whether what was told last has been seen
        self.expected = False  # whether the last look that was due should find something, or be thorough
        self._unasked = False  # whether it was one for safety only
        self._looked = self._poke_answered = -math.inf
        self._interval = 0.0  # between two looks, when it was asked last

    def due(self, poll_s: float) -> bool:
        """Whether to look now; if so, the look is taken for made. `poll_s`: usual seconds between looks."""
        with self._rung:
            now, interval = self._clock(), self._quota.interval(poll_s)
            self._interval = interval
            if self._quota.blocked_s():
                return False
            now += _EARLY * interval
            poked = self._poked and now - self._poke_answered >= interval
            if not (self._told or poked or now - self._looked >= self._longest(interval)):
                return False
            now = self._clock()
            self._poke_answered = now if poked else self._poke_answered
            self._unasked = self._live and self._sure and not (self._told or poked)
            self.expected = self._told or poked or self._unasked
            # A store may show a write a moment after it told of it: one more look will come soon.
            self._sure = not (self._told or poked)
            self._told, self._poked, self._looked = False, False, now
            return True

    def wait(self, seconds: float) -> None:
        """Let so many seconds pass; less where something is told, or this is closed."""
        with self._rung:
            self._rung.wait_for(lambda: self._ringing or self._closed, seconds)
            self._ringing = False

    def poke(self) -> None:
        """Somebody says that there is news. At most one look per interval comes of it, however often."""
        with self._rung:
            self._poked = True
            if self._clock() - self._poke_answered >= self._interval:  # else the next turn is soon enough
                self._ring()

    def tell(self) -> None:
        """There is news."""
        with self._rung:
            self._told = True
            self._ring()

    def doubt(self) -> None:
        """The last look failed or must be made again: the next one comes after an interval, not later."""
        with self._rung:
            self._sure = False

    def found(self) -> None:
        """The last look found something new; where nobody told of it, nobody is relied on for a while."""
        if self._unasked:
            self._set_live(False)

    def again(self) -> None:
        """The next look is due, whenever somebody asks."""
        with self._rung:
            self._told = True

    def close(self) -> None:
        """End all waiting, for ever."""
        with self._rung:
            self._closed = True
            self._rung.notify_all()

    def how(self, poll_s: float) -> str:
        """In words, how changes are noticed now."""
        if blocked_s := self._quota.blocked_s():
            return f"not for {blocked_s:.0f} s: the store refused more requests of this token"
        if self._live:
            return "told by the store"
        interval = self._quota.interval(poll_s)
        shared = f", as the token's quota of requests is shared; usual is {poll_s:g} s"
        return f"looks every {interval:.4g} s" + (shared if interval > poll_s else "")

    def _longest(self, interval: float) -> float:
        return max(SAFETY_S, interval) if self._live and self._sure else interval

    def _ring(self) -> None:
        self._ringing = True
        self._rung.notify_all()

    def _set_live(self, live: bool) -> None:
        """Whether each change is told from now on."""
        with self._rung:
            self._live = live
