"""Limits: connections, capacity and log lines that clients may use, and time to end after a signal to stop.

A trainer is known by the key. A visitor is known by the network address. No visitor, and not all visitors
together, can take the capacity that a trainer needs.

Connections have their own limits here, because uvicorn waits without limit for a request's head. Its options
only end a connection after an answer (`timeout_keep_alive`), or refuse every client under load, trainers
included (`limit_concurrency`).
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space_guard.requests import has_key, too_many

Client = str | None  # a visitor's address, or None for a client with the key

# The networks of the Hub's proxies: this machine and the private networks of RFC 1918, 4193 and 6598. As the
# client's address, uvicorn (`forwarded_allow_ips`) takes the last one in X-Forwarded-For that is in none of
# them. A client can only forge the addresses before it.
PROXIES = "127.0.0.0/8,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7"


def client_address(scope: Scope) -> str:
    """The address that limits apply to. For IPv6 it is the /64 network, which belongs to one customer."""
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or ip_network((address.packed, 64), strict=False))
    return str(address)


MAX_HEADERS = 100


@dataclass(frozen=True)
class Limits:
    """What one connection may use."""

    request_s: float  # for a request to arrive, from connecting or from its first byte if it is a later one
    covers_body: bool  # whether request_s covers the body too, or only the head
    unread_s: float  # time in which the client must read some of its answer
    head_bytes: int  # of a request without its body
    pipelined: int  # requests that may wait behind the one that is being answered
    keep_active: bool  # whether a visitor's connection is not evicted while its request is answered


class _Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. If `key` is empty, any complete request counts as showing the key.

    `visitors`: connections that have not shown the key; the one that was quiet longest is first. If there are
    more than `max_visitors`, the first is closed. So a new client gets in, and a client with the key stays.
    """

    def __init__(
        self, *, limits: Limits, visitors: dict[_Connection, None], max_visitors: int, key: str, **given: Any
    ) -> None:
        super().__init__(**given)
        self._limits, self._visitors, self._max_visitors, self._key = limits, visitors, max_visitors, key
        self._known = False  # has shown the key
        self._deadline: asyncio.TimerHandle | None = None
        self._complete = True  # no request is only partly received
        self._head = 0  # bytes received of the current request, without its body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None and opened.family in (socket.AF_INET, socket.AF_INET6):
            # The kernel ends a connection whose client reads nothing for this long, even while it closes.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._limits.unread_s * 1000))
        self._join_visitors()
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._visitors.pop(self, None)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which refuses a client without the key."""
        self._stop_clock()
        self._visitors.pop(self, None)
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
        """Limit waiting requests. An error raised here or in the methods below becomes an answer 400."""
        if self._answering() and len(self.pipeline) >= self._limits.pipelined:
            raise ValueError("too many requests on one connection before the first is answered")
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
        if self._known:
            self._visitors.pop(self, None)
        if not self._limits.covers_body:
            self._stop_clock()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)  # the app limits the body itself
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._stop_clock()
        if self._limits.keep_active:
            self._visitors.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The connection is quiet from now on."""
        if not self._known and not self.transport.is_closing():
            self._join_visitors()
        super().on_response_complete()

    def _join_visitors(self) -> None:
        self._visitors.pop(self, None)
        self._visitors[self] = None
        if len(self._visitors) > self._max_visitors:
            oldest = next(iter(self._visitors))
            del self._visitors[oldest]
            oldest.transport.abort()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.request_s, self._late)

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
            late = f"The request did not arrive within {self._limits.request_s:g} s."
            self.send_400_response(f"{late} Send it again.")


def limited_http(limits: Limits, max_visitors: int, key: str) -> Any:
    """The value of uvicorn's option `http`: a protocol with these limits for one server."""
    return partial(_Connection, limits=limits, visitors={}, max_visitors=max_visitors, key=key)


def open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or the most that the system allows. Returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


STOP_S, _CLEAN_S = 20, 5  # time to stop by itself; after that, time to remove temporary files


class _Server(uvicorn.Server):
    """uvicorn, in a process that ends after a signal even if one of its threads never ends."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        def end() -> None:
            signal.alarm(_CLEAN_S)  # ends the process, whatever Python does
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
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(1)


@dataclass(frozen=True)
class Lane:
    """Requests that share limits."""

    capacity: int  # units in use at the same time
    seconds: float | None  # how long one request may take; None: no limit

    def shares(self, client: Client) -> dict[str, int]:
        """The counters that a request of `client` adds to, each with its maximum. A quarter of the capacity
        is reserved for clients with the key, and one visitor gets at most a quarter."""
        if client is None:
            return {"all": self.capacity}
        quarter = self.capacity // 4
        visitors = {"visitors": self.capacity - quarter, f"visitor {client}": max(1, quarter)}
        return {"all": self.capacity, **visitors}


class Admission:
    """Admits requests to lanes. A request in a lane that is not listed is not limited."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._used: Counter[tuple[str, str]] = Counter()

    def seconds(self, name: str) -> float | None:
        """How long a request in the lane may take, None for no limit."""
        return self._lanes[name].seconds if name in self._lanes else None

    @contextmanager
    def admit(self, name: str, client: Client, units: int) -> Iterator[None]:
        """Hold `units` of a lane. Raises `HTTPException` if the lane or the client's share is full."""
        shares = self._lanes[name].shares(client) if name in self._lanes else {}
        if any(self._used[name, counter] + units > limit for counter, limit in shares.items()):
            raise too_many("too many requests of this kind are being answered")
        for counter in shares:
            self._used[name, counter] += units
        try:
            yield
        finally:
            for counter in shares:
                self._used[name, counter] -= units
                if not self._used[name, counter]:
                    del self._used[name, counter]  # otherwise every address would stay in memory


class LogLimit(logging.Filter):
    """Limits log lines per minute, in total or per line of code. The next minute logs how many it dropped."""

    def __init__(
        self, per_minute: int, *, per_source: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._limit, self._per_source, self._clock = per_minute, per_source, clock
        self._minute, self._seen, self._dropped = 0, Counter[object](), Counter[object]()

    def filter(self, record: logging.LogRecord) -> bool:
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
    """Write the process's log to standard error as JSON, at most `per_minute` records per source line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogLimit(per_minute, per_source=True))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
