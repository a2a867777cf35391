"""Connections of the public port: those of which no request comes are ended, so that they cannot pile up.

uvicorn waits for the head of a request without end, and keeps whatever is sent of it. Its options end idle
connections after an answer (`timeout_keep_alive`), or refuse everybody, trainers too, once there are many
(`limit_concurrency`).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inference_space.gate import KEYED

HEAD_S = 15.0  # seconds for the head of a request
HEAD_BYTES = 64 << 10
WAITING = 256  # connections of visitors on which nothing is being answered
UNREAD_S = 60  # seconds in which a client must read something of its answer


class Connection(HttpToolsProtocol):
    """uvicorn's own, which does not wait for ever."""

    _clock: asyncio.TimerHandle | None = None  # runs while a head is waited for
    _head = 0  # bytes of it that have come
    since = 0.0  # when the last answer ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection; the one of a visitor that has been idle for longest may have to go."""
        super().connection_made(transport)
        _give_up_unread(transport.get_extra_info("socket"))
        self.since = self.loop.time()
        self._wait_for_head()
        idle = [other for other in self.connections if isinstance(other, Connection) and other.idle]
        if len(idle) > WAITING:
            min(idle, key=lambda other: other.since).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether it is a visitor's, and nothing is being answered."""
        keyed = self.scope is not None and KEYED in self.scope["state"]
        return not keyed and self._answered()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Some bytes; those of a head are counted."""
        if self._clock is None and self._answered():
            self._wait_for_head()
        super().data_received(data)
        self._head += len(data)
        if self._clock is not None and self._head > HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """The head is there; one before the answer to the last ends both.

        No client needs that, and uvicorn would not tell the first that its client has gone.
        """
        self._stop_waiting()
        if self._answered():
            super().on_headers_complete()
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """The answer is there; uvicorn waits for the next request from now on."""
        self.since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head = 0
        self._clock = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def _give_up_unread(link: Any) -> None:
    """Have the kernel end a connection whose client reads nothing: what it was sent would stay in memory."""
    if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
