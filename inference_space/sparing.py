"""A log that cannot be flooded: so many records a minute, and how many more there were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST = 20  # records a minute: each may be a traceback of kilobytes


class Sparing(logging.Filter):
    """Lets the first records of each minute pass; the first of the next one says what was left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._minute, self._seen = clock, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        minute = int(self._clock() / 60)
        if minute != self._minute:
            if self._seen > MOST:
                record.msg = f"({self._seen - MOST} such lines were left out) {record.msg}"
            self._minute, self._seen = minute, 0
        self._seen += 1
        return self._seen <= MOST
