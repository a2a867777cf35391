"""Logs as one JSON object a line: what the server says, and how each game ended."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

from env_space.metrics import outcome
from env_space.sessions import Session

A_MINUTE = 600  # lines that one place in the code may write
_LAST = f"more than {A_MINUTE} lines of this kind a minute; the others are left out"

_log = logging.getLogger("wordle")


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


class Seldom(logging.Filter):
    """Lets at most `A_MINUTE` records a minute pass from each place in the code; the last one says so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._since = clock, clock()
        self._passed: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if self._clock() - self._since >= 60:
            self._passed.clear()
            self._since = self._clock()
        place = record.pathname, record.lineno
        self._passed[place] += 1
        if self._passed[place] == A_MINUTE:
            record.fields = getattr(record, "fields", {}) | {"flood": _LAST}
        return self._passed[place] <= A_MINUTE


def log_as_json() -> None:
    """Write every log record of the process, also uvicorn's, to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(Seldom())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would name the replica at every move


def log_game(session: Session) -> None:
    """One line about a game that ended."""
    game, origin = session.game, session.origin
    parts = game.reward_parts()
    fields = {
        "session": str(session.id),
        "outcome": outcome(session),
        "seed": origin.seed,
        "split": origin.split,
        "via": origin.via,
        "turns": game.turns,
        "invalid": game.tally.invalid,
        "repeated": game.tally.repeated,
        "reward": round(parts.total, 6),
        "reward_parts": {name: round(value, 6) for name, value in asdict(parts).items()},
        "seconds": round(session.used_at - session.opened_at, 3),
    }
    _log.info("game ended", extra={"fields": fields})
