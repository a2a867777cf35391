"""Limits on a connection before its owner is known: how long, how large, and how many.

uvicorn waits without limit for a request's head. Its own options end a connection after an answer
(`timeout_keep_alive`) or, under load, refuse every client (`limit_concurrency`), a trainer included.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space_guard.requests import has_key

__all__ = ["Limits", "limited_http"]

MAX_HEADERS = 100


@dataclass(frozen=True)
class Limits:
    """What one connection may use."""

    request_s: float  # for a request, from connecting or from the first byte of a later request
    covers_body: bool  # whether request_s covers the body too, or only the head
    unread_s: float  # within which the client must read some of its answer
    head_bytes: int  # of a request without its body
    pipelined: int  # requests that may wait behind the one that is being answered
    keep_active: bool  # whether a visitor's connection is safe from eviction while it is being answered


class _Visitors:
    """The connections that have not shown the key, at most `limit` of them.

    One more evicts the connection that has been quiet longest, so a new client always gets in and a client
    with the key stays.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._quiet: dict[_Connection, None] = {}  # quiet longest first

    def __len__(self) -> int:
        return len(self._quiet)

    def add(self, connection: _Connection) -> None:
        self.remove(connection)
        self._quiet[connection] = None
        if len(self._quiet) > self._limit:
            oldest = next(iter(self._quiet))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: _Connection) -> None:
        self._quiet.pop(connection, None)


class _Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. If `key` is empty, a client is known after its first request."""

    def __init__(self, *, limits: Limits, visitors: _Visitors, key: str, **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._visitors, self._key = limits, visitors, key
        self._known = False  # has shown the key
        self._deadline: asyncio.TimerHandle | None = None
        self._complete = True  # no request has begun without ending
        self._head = 0  # bytes received of the current request, without its body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None and opened.family in (socket.AF_INET, socket.AF_INET6):
            # The kernel ends a connection whose client reads nothing for this long, even while it closes.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._limits.unread_s * 1000))
        self._visitors.add(self)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol; a client without the key is refused there."""
        self._leave()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that is too large."""
        if self._complete:
            self._start_clock()
        self._head += len(data)
        super().data_received(data)
        if self._complete:
            self._head = 0
        elif self._head > self._limits.head_bytes and not self.transport.is_closing():
            limit = f"Send at most {self._limits.head_bytes} bytes."
            self.send_400_response(f"The head of the request is too large. {limit}")

    def on_message_begin(self) -> None:
        """uvicorn answers an error raised here or below with 400."""
        if self._answering() and len(self.pipeline) >= self._limits.pipelined:
            raise ValueError("too many requests before the answer to the first")
        self._complete = False
        self._start_clock()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count headers and trailers."""
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._known = self._known or has_key(self._key, self.headers)
        if self._known or self._limits.keep_active:
            self._visitors.remove(self)
        if not self._limits.covers_body:
            self._stop_clock()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)  # the app limits the body itself
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._stop_clock()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The connection is quiet from now on."""
        if not self._known and not self.transport.is_closing():
            self._visitors.add(self)
        super().on_response_complete()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.request_s, self._late)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _leave(self) -> None:
        self._stop_clock()
        self._visitors.remove(self)

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or (self._complete and self._answering()):
            return
        if self._complete:
            self.transport.close()  # nothing came: a browser's spare connection needs no answer
        else:
            late = f"The request did not arrive within {self._limits.request_s:g} s."
            self.send_400_response(f"{late} Send it again.")


def limited_http(limits: Limits, max_visitors: int, key: str) -> Any:
    """The value of uvicorn's option `http`: a protocol with these limits for one server."""
    return partial(_Connection, limits=limits, visitors=_Visitors(max_visitors), key=key)
