"""Which calls of the dashboard's events pass the gate: those of its events, with the values that each takes.

Gradio takes a file's description in the place of any value, wherever it stands, and fetches what it names:
a URL from this machine. And it prints a traceback for whatever does not fit. So nothing else reaches Gradio.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inference_space.whole import Whole

Kind = Literal["text", "number", "kept"]  # "kept": by the server, whatever is sent
LONGEST = 1024  # characters of a text
_LARGEST = 1 << 53


@dataclass(frozen=True)
class Calls:
    """Reads calls of events: `events` is number -> kinds of its inputs."""

    events: Mapping[int, Sequence[Kind]]
    limit: int = 16 << 10

    def read(self, body: bytes) -> Whole:
        """The same call, of its known parts only, written anew; raises `ValueError` for any other."""
        call = _parsed(body)
        event, data = call.get("fn_index"), call["data"]
        kinds = self.events.get(event) if type(event) is int else None
        if kinds is None or len(kinds) != len(data):
            raise ValueError("an event of the dashboard has its number and its inputs: reload the page")
        passed = {"fn_index": event, "data": list(map(_value, kinds, data))}
        return Whole(json.dumps({**passed, **_session(call)}).encode())


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("an event of the dashboard is a JSON object") from None
    if not isinstance(call, dict) or not isinstance(call.get("data"), list):
        raise ValueError("an event of the dashboard is a JSON object with a list of data")
    return call


def _value(kind: Kind, value: Any) -> Any:
    if kind == "kept" or value is None:
        return None
    if kind == "text" and isinstance(value, str) and len(value) <= LONGEST:
        return value
    if kind == "number" and type(value) in (int, float) and abs(value) <= _LARGEST:  # NaN is not
        return value
    raise ValueError("an event of the dashboard carries numbers and words only, as its page sends them")


def _session(call: Mapping[str, Any]) -> dict[str, Any]:
    session, trigger = call.get("session_hash"), call.get("trigger_id")
    if not isinstance(session, str) or not re.fullmatch(r"\w{1,40}", session, re.ASCII):
        raise ValueError("an event of the dashboard names its session")
    if trigger is not None and type(trigger) is not int:
        raise ValueError("an event of the dashboard names what set it off by a number")
    return {"session_hash": session, "trigger_id": trigger}
