"""Logs as one JSON object a line: what the server says, and how each game ended."""

import json
import logging
import sys
from dataclasses import asdict
from datetime import UTC, datetime

from env_space.metrics import outcome
from env_space.sessions import Session

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


def log_as_json() -> None:
    """Write every log record of the process, also uvicorn's, to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
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
