"""Which calls of the dashboard's events pass the gate: those with plain values.

Gradio takes a file's description in the place of any value, wherever it stands, and fetches what it names:
a URL from this machine. The dashboard's events need numbers and words only, so nothing else reaches Gradio.
"""

from __future__ import annotations

import json
from typing import Any

_PARTS = ("data", "fn_index", "session_hash", "trigger_id")


def plain_call(body: bytes) -> bytes:
    """The same call, of these parts only, written anew; raises `ValueError` if it holds more than values."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("an event of the dashboard is a JSON object") from None
    if not isinstance(call, dict) or not isinstance(call.get("data"), list):
        raise ValueError("an event of the dashboard is a JSON object with a list of data")
    parts = {name: call[name] for name in _PARTS if name in call}
    if not all(map(_plain, [*parts.pop("data"), *parts.values()])):
        raise ValueError("an event of the dashboard carries numbers and words only")
    return json.dumps({**parts, "data": call["data"]}).encode()


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
