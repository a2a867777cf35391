"""The Hub's feed of a bucket's changes: server-sent events that can be resumed.

    GET /api/buckets/<owner>/<name>/events[?cursor=...]      Accept: text/event-stream

Each event carries JSON: `ready` (everything missed has been sent, changes follow as they happen), `changes`
(paths and what happened to them), `reset` (the cursor is too old: the Hub remembers about a quarter of an
hour) and `reconnect` (the server wants to end this connection). Comments come in between, about every half
minute. A Hub without this feed, or one that refuses it to this token, answers with an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    parse_ratelimit_headers,
)

from delta_weight_sync.store._notifications import Notifications, Quota

CONNECT_S: Final = 10.0
SILENCE_S: Final = 90.0  # a connection without a byte for this long counts as dead
STEADY_S: Final = 60.0  # a connection that lasted this long is followed by the next one without a pause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 320.0  # between two connections; doubles while they do not last
_log = logging.getLogger("delta_weight_sync")


class HubNotifications(Notifications):
    """Notifications from the Hub's feed, if it has one. The first call of `due` connects."""

    def __init__(self, endpoint: str, bucket_id: str, folder: str, quota: Quota) -> None:
        """`folder`: a prefix of paths in the bucket; changes elsewhere are ignored."""
        super().__init__(quota)
        self._url, self._folder, self._cursor = f"{endpoint}/api/buckets/{bucket_id}/events", folder, ""
        self._connection: socket.socket | None = None
        self._done, self._muted = threading.Event(), False
        self._thread: threading.Thread | None = None

    def due(self, poll_s: float) -> bool:
        due = super().due(poll_s)
        if self._thread is None:  # later than the look that is due, which may miss changes before it
            self._thread = threading.Thread(target=self._run, name="bucket-events", daemon=True)
            self._thread.start()
        return due

    def close(self) -> None:
        super().close()
        self._done.set()
        self._hang_up()
        if self._thread:
            self._thread.join(CONNECT_S)

    def confirm(self) -> None:
        """As in `Notifications`; a feed that is open and reports nothing is left for the longest pause."""
        if self._unprompted:
            super().confirm()
            self._muted = True
            self._hang_up()

    def _hang_up(self) -> None:
        if self._connection:
            with contextlib.suppress(OSError):  # it has ended already
                self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """One connection after the other; between them the clock decides when to look."""
        failures = 0
        while not self._done.is_set():
            started, pause_s = time.monotonic(), 0.0
            try:
                pause_s = self._follow()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next connection may be better
                _log.debug("the feed at %s ended: %r", self._url, error)
            self._set_live(False)
            failures = 0 if time.monotonic() - started >= STEADY_S else failures + 1
            pause_s, self._muted = LONGEST_PAUSE_S if self._muted else pause_s, False
            self._done.wait(max(_pause_s(failures), min(pause_s, LONGEST_PAUSE_S)))

    def _follow(self) -> float:
        """Follow one connection to its end; returns the seconds for which the Hub wants no other one."""
        headers = {**build_hf_headers(), "accept": "text/event-stream"}
        cursor = {"cursor": self._cursor} if self._cursor else {}
        limits = (CONNECT_S, SILENCE_S, CONNECT_S, CONNECT_S)  # to connect, read, write, get a place
        with get_session().stream("GET", self._url, headers=headers, params=cursor, timeout=limits) as answer:
            if answer.status_code != 200 or "event-stream" not in answer.headers.get("content-type", ""):
                self._cursor = ""  # it may be the reason for the refusal
                return retry_after_s(answer.headers) or 0.0
            stream = answer.extensions.get("network_stream")
            self._connection = stream.get_extra_info("socket") if stream else None
            for name, payload in _events(answer.iter_lines()):
                if self._done.is_set() or not self._take(name, payload):
                    break
        return 0.0

    def _take(self, name: str, payload: dict[str, Any]) -> bool:
        """Act on one event; False if it is the last one of its connection."""
        resumed, self._cursor = bool(self._cursor), str(payload.get("cursor") or self._cursor)
        if name == "ready":
            self._set_live(True)
            if not resumed:
                self.wake()  # there may have been changes before this connection
        elif name == "changes":
            changes = [change for change in payload.get("changes") or () if isinstance(change, dict)]
            if any(change.get("path", "").startswith(self._folder) for change in changes):
                self.wake()
        elif name == "reset":
            self._cursor = ""
        return name not in ("reset", "reconnect")


def _events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and payload of each event of a stream; raises `ValueError` for a payload that is not JSON."""
    name, data = "", ""
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            data += value
        elif not line:
            payload = json.loads(data) if data else None
            if isinstance(payload, dict):
                yield name, payload
            name, data = "", ""


def retry_after_s(headers: Any) -> float | None:
    """Seconds for which an answer asks the client to stay away; None if it does not say."""
    retry_after, quota = headers.get("retry-after", ""), parse_ratelimit_headers(headers)
    if retry_after.isdigit():
        return float(retry_after)
    return float(quota.reset_in_seconds) if quota else None


def _pause_s(failures: int) -> float:
    """Seconds before the next connection; random, because many may lose theirs at the same moment."""
    usual = FIRST_PAUSE_S * 2.0 ** (failures - 1) if failures else 1.0
    return min(usual, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
