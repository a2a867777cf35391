"""What a connection may take before anybody knows whose it is: so long, so much, and so many of them.

uvicorn limits none of this. A client that sends its request byte by byte, or nothing at all, would keep a
connection for ever, and enough of them keep everybody out.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from env_space.keys import opens

REQUEST_S = 20.0  # from a connection, or the first byte of another request on it, to the request's last byte
READING_S = 30.0  # in which a client has to take some of what it is sent
MAX_HEAD = 16 * 1024  # bytes of a request besides its body
MAX_HEADERS = 100
MAX_PIPELINED = 8  # requests that wait behind the one that is being answered
LATE = f"The request did not come within {REQUEST_S:g} s; send it again."
LARGE = f"The head of the request is too large; send at most {MAX_HEAD} bytes."


class Strangers:
    """The connections on which nobody has shown the key yet, at most so many.

    Of more, the one that has been quiet for longest is cut off. So however many there are, who comes gets in,
    and who has the key stays.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._quiet: dict[Connection, None] = {}  # for longest first

    def __len__(self) -> int:
        """How many there are."""
        return len(self._quiet)

    def heard(self, connection: Connection) -> None:
        """It has come, or was answered."""
        self.forget(connection)
        self._quiet[connection] = None
        if len(self._quiet) > self._places:
            next(iter(self._quiet)).cut_off()

    def forget(self, connection: Connection) -> None:
        """It has ended, or has shown the key."""
        self._quiet.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with an end to its patience.

    `key` opens the API; without one everybody is known by the first request.
    """

    def __init__(self, *, strangers: Strangers, key: bytes, **given: Any) -> None:
        super().__init__(**given)
        self._strangers, self._key = strangers, key
        self._known = False
        self._deadline: asyncio.TimerHandle | None = None
        self._whole = True  # no request has been begun and not ended
        self._head = 0  # bytes of the one that has, besides its body

    def cut_off(self) -> None:
        """End it at once, whatever was to be sent."""
        self._strangers.forget(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From now on a request has to come."""
        super().connection_made(transport)
        # The kernel ends a connection whose client reads nothing for so long, also one that is being closed.
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READING_S * 1000))
        self._strangers.heard(self)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It takes no place any more."""
        self._leave()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """From now on another protocol has it, which is told at once if it has no key."""
        self._leave()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        """Read on, and end it where its head has no end."""
        self._expect()
        self._head += len(data)
        super().data_received(data)
        if self._whole:
            self._head = 0
        elif self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(LARGE)

    def on_message_begin(self) -> None:
        """A request begins. An error that is raised here or below is answered with 400."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("so many requests at once")
        self._whole = False
        self._expect()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one that follows a body."""
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("so many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Now it is known who asks."""
        if not self._known and opens(self._key, self.headers):
            self._known = True
            self._strangers.forget(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which the app limits."""
        self._head -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._whole = True
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """From now on it is quiet."""
        if not self._known:
            self._strangers.heard(self)
        super().on_response_complete()

    def _expect(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _leave(self) -> None:
        self._stop_waiting()
        self._strangers.forget(self)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self._whole:
            self.transport.close()  # nothing came: a browser keeps spare connections, and needs no answer
        else:
            self.send_400_response(LATE)
