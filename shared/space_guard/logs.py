"""Logs that a client cannot flood, and logs as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["LogLimit", "log_as_json"]

Clock = Callable[[], float]


class LogLimit(logging.Filter):
    """A rate limit for a log, in total or per line of code. The next minute says how many were dropped."""

    def __init__(self, per_minute: int, *, per_source: bool = False, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._limit, self._per_source, self._clock = per_minute, per_source, clock
        self._minute, self._seen, self._dropped = 0, Counter[object](), Counter[object]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        minute = int(self._clock() / 60)
        if minute != self._minute:
            over = {source: seen - self._limit for source, seen in self._seen.items() if seen > self._limit}
            self._minute, self._seen, self._dropped = minute, Counter(), Counter(over)
        source = (record.pathname, record.lineno) if self._per_source else None
        if dropped := self._dropped.pop(source, 0):
            record.msg = f"({dropped} similar lines were dropped) {record.msg}"
        self._seen[source] += 1
        return self._seen[source] <= self._limit


class JsonLines(logging.Formatter):
    """A record as one line of JSON; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json(per_minute: int) -> None:
    """Write every log record of the process to standard error as JSON, `per_minute` of each source line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogLimit(per_minute, per_source=True))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
