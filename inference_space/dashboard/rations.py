"""What visitors together may ask of the bucket: the owner's quota is for replicas and the trainer.

What is read once is kept (`library.py`), so this is met only by who asks for one thing after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delta_weight_sync.store import Bucket, BucketError, Listing
from delta_weight_sync.units import size_text

WINDOW_S = 300.0  # as the Hub counts
CALLS = 240  # in a window; each is up to three requests: the Hub allows a free user 1,000 to its API
BYTES = 2_000_000_000  # in a window; enough for the largest version that a dashboard rebuilds


class RationedError(BucketError):
    """Visitors have asked for enough; the message says when there is more."""


class Ration:
    """So much in any `WINDOW_S` seconds, and at once as much as was left; any thread may spend it."""

    def __init__(self, what: str, amount: int, clock: Callable[[], float]) -> None:
        """`what`: the amount in words."""
        self._what, self._amount, self._clock = what, amount, clock
        self._left, self._at, self._lock = float(amount), clock(), threading.Lock()

    def spend(self, amount: int) -> None:
        """Raises `RationedError` where that is more than is left."""
        with self._lock:
            now, rate = self._clock(), self._amount / WINDOW_S
            self._left = min(self._left + (now - self._at) * rate, self._amount)
            self._at = now
            if amount > self._left:
                wait_s = (min(amount, self._amount) - self._left) / rate
                raise RationedError(
                    f"visitors have used the {self._what} that this dashboard reads in {WINDOW_S / 60:.0f}"
                    f" minutes: try again in {max(wait_s, 1):.0f} s, or read the bucket with your own token"
                )
            self._left -= amount


class Rationed:
    """A bucket, read by visitors. What writes is not passed on."""

    def __init__(self, bucket: Bucket, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket, self.url = bucket, bucket.url
        self._calls = Ration(f"{CALLS} requests", CALLS, clock)
        self._bytes = Ration(size_text(BYTES), BYTES, clock)

    def get(self, key: str) -> bytes:
        """As the bucket's."""
        self._calls.spend(1)
        return self._bucket.get(key)

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        """As the bucket's; `limit` is what it costs."""
        self._calls.spend(1)
        self._bytes.spend(limit)
        self._bucket.fetch(key, dest, limit)

    def stat(self, key: str) -> Any:
        """As the bucket's."""
        self._calls.spend(1)
        return self._bucket.stat(key)

    def list(self, prefix: str) -> Listing:
        """As the bucket's."""
        self._calls.spend(1)
        return self._bucket.list(prefix)
