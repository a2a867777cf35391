"""Limits the connections, capacity and log lines that clients may use, and ends the server after a signal.

A client that sends the key counts as a trainer. Every other client is a visitor, identified by its network
address. Visitors, even all together, cannot take the capacity that a trainer needs. uvicorn cannot limit
connections in this way: it waits without limit for a request's head, and its `limit_concurrency` refuses
every client under load, trainers included.
"""

import asyncio
import atexit
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space_guard.requests import RateLimit, has_key, too_many

Client = str | None  # a visitor's address, or None for a client with the key

# The networks of the Hub's proxies: this machine and the private networks of RFC 1918, 4193 and 6598. With
# its option `forwarded_allow_ips`, uvicorn reads X-Forwarded-For from the end. The first address outside of
# these networks is the client's address. A client can forge only addresses further left in this header.
PROXIES = "127.0.0.0/8,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7"
MAX_HEADERS = 100  # of a request, trailers included
STOP_S = 20  # seconds after a signal in which uvicorn must stop
_CLEAN_S = 5  # further seconds to remove temporary files, if uvicorn did not stop


def client_address(scope: Scope) -> str:
    """The address for which requests are counted. For IPv6, this is the /64 network of one customer."""
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or ip_network((address.packed, 64), strict=False))
    return str(address)


@dataclass(frozen=True)
class Limits:
    """What one connection may use."""

    # Seconds until the head of a request is complete. For the first request of a connection, the time begins
    # when the client connects. For a later request, the time begins with the first byte of the head.
    request_s: float
    unread_s: float  # seconds in which the client must read some of its answer
    head_bytes: int  # of a request, its body not counted
    keep_active: bool  # if true, no visitor's connection is closed to make room while it is being answered


class _Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits.

    `visitors` are the HTTP connections on which no key has come so far. If `keep_active` is true, those that
    are being answered do not count. If there are more than `max_visitors`, the one that was opened or
    answered longest ago is closed. So new clients can always connect, and clients with the key keep their
    connections. If `key` is empty, every client that has sent a complete head counts as having the key.
    """

    limits: Limits
    key: str
    max_visitors: int
    visitors: "dict[_Connection, None]"

    _known = False  # has sent the key
    _deadline: asyncio.TimerHandle | None = None
    _complete = True  # False from the first byte of a request to its last
    _head = 0  # bytes received of the current request, without its body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None and opened.family in (socket.AF_INET, socket.AF_INET6):
            # The kernel ends a connection whose client reads nothing for this long, even if the server has
            # begun to close this connection.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.limits.unread_s * 1000))
        self._join_visitors()
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.visitors.pop(self, None)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol; the app decides whom to refuse."""
        self._stop_clock()
        self.visitors.pop(self, None)
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._complete:  # these bytes begin the next request
            self._start_clock()
        self._head += len(data)
        super().data_received(data)
        if self._complete:
            self._head = 0
        elif self._head > self.limits.head_bytes and not self.transport.is_closing():
            limit = f"Send at most {self.limits.head_bytes} bytes."
            self.send_400_response(f"The head of the request is too large. {limit}")

    def on_message_begin(self) -> None:
        """Allow one request at a time. uvicorn answers errors of the parser's callbacks with status 400."""
        if self._answering():
            raise ValueError("the request before this one is not answered yet")
        self._complete = False
        self._start_clock()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._known = self._known or has_key(self.key, self.headers)
        if self._known:
            self.visitors.pop(self, None)
        self._stop_clock()  # the app limits the body's time and size itself
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._complete = True
        if self.limits.keep_active and self._answering():  # perhaps the answer is complete already
            self.visitors.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._known and not self.transport.is_closing():
            self._join_visitors()
        super().on_response_complete()

    def _join_visitors(self) -> None:
        self.visitors.pop(self, None)
        self.visitors[self] = None
        if len(self.visitors) > self.max_visitors:
            oldest = next(iter(self.visitors))
            del self.visitors[oldest]
            oldest.transport.abort()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.request_s, self._late)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or (self._complete and self._answering()):
            return
        if self._complete:
            self.transport.close()  # nothing came: a browser's spare connection needs no answer
        else:
            late = f"The request did not arrive within {self.limits.request_s:g} s."
            self.send_400_response(f"{late} Send it again.")


def limited_http(limits: Limits, max_visitors: int, key: str) -> type[HttpToolsProtocol]:
    """Make a protocol with these limits, for the option `http` of one uvicorn server."""
    shared = {"limits": limits, "max_visitors": max_visitors, "key": key, "visitors": {}}
    return type("Connection", (_Connection,), shared)


def open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or fewer if the system's limit is lower. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # on Linux, neither is RLIM_INFINITY
    allowed = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return allowed


class _Server(uvicorn.Server):
    """uvicorn, in a process that ends after a signal even if one of its threads never ends."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        def end() -> None:
            signal.alarm(_CLEAN_S)  # after this time, the kernel ends the process, whatever Python does
            atexit._run_exitfuncs()
            os._exit(128 + sig)

        if not self.should_exit:
            timer = threading.Timer(STOP_S, end)
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


def serve(app: ASGIApp, sockets: list[socket.socket] | None = None, **options: Any) -> None:
    """Serve `app` with uvicorn's `options` until SIGTERM or SIGINT; then the process ends within 30 s."""
    server = _Server(uvicorn.Config(app, **options))

    def leave(number: int, frame: Any) -> None:
        server.handle_exit(number, frame)  # stops uvicorn even if some code swallows the `SystemExit`
        sys.exit(128 + number)  # in the ordinary way, which removes temporary folders

    # After uvicorn has stopped, it restores this handler and raises SIGTERM again.
    signal.signal(signal.SIGTERM, leave)
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(1)


class Lane:
    """Requests that share a capacity. The caller says how many units a request takes, for example its bytes.

    `capacity // 4` units are reserved for clients with the key. Each visitor can hold `capacity // 4` units,
    or 1 unit if that is 0. `seconds` is the time limit of each request; the caller enforces this limit.
    """

    def __init__(self, capacity: int, seconds: float | None = None) -> None:
        self.capacity, self.seconds = capacity, seconds
        self._used = Counter[str]()

    @contextmanager
    def admit(self, client: Client, units: int) -> Iterator[None]:
        """Hold `units` during a `with` body. Raises `HTTPException` if the client may not use them now."""
        shares = {"all": self.capacity}
        if client is not None:
            quarter = self.capacity // 4
            shares |= {"visitors": self.capacity - quarter, f"visitor {client}": max(1, quarter)}
        if any(self._used[share] + units > limit for share, limit in shares.items()):
            raise too_many("too many requests of this kind are being answered")
        self._used.update(dict.fromkeys(shares, units))
        try:
            yield
        finally:
            self._used.subtract(dict.fromkeys(shares, units))
            self._used = +self._used  # without the zeros: otherwise every address would stay in memory


class LogLimit(logging.Filter):
    """Lets a line of code log at most `per_minute` (2 or more) records in any minute, and counts the rest."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        # A line of code can save up `per_minute / 2` records, and earns as many within the minute.
        self._rate, self._dropped = RateLimit(per_minute / 120, per_minute / 2, clock), Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        source = f"{record.pathname}:{record.lineno}"
        if self._rate.spend(source, 1):
            self._dropped[source] += 1
            return False
        if dropped := self._dropped.pop(source, 0):
            record.msg = f"({dropped} similar lines were dropped) {record.msg}"
        return True


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; `extra={"fields": {...}}` adds fields to the line."""

    def format(self, record: logging.LogRecord) -> str:
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
    """Write the process's log to standard error as JSON, limited by `LogLimit`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogLimit(per_minute))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
