"""How many requests may run at the same time, and how many a client may send per second.

A trainer is known by the key. A visitor is known by the network address. No visitor, and not all visitors
together, can take the capacity that a trainer needs.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network

from starlette.types import Scope

from space_guard.requests import Refusal

__all__ = ["PROXIES", "Admission", "Client", "Lane", "RateLimit", "client_address"]

Client = str | None  # a visitor's address, or None for a client with the key

# Where the Hub's proxies are: this machine and the private networks of RFC 1918, 4193 and 6598. uvicorn
# (`forwarded_allow_ips`) takes the last address of X-Forwarded-For that is not one of them as the client's. A
# client can only forge what stands before it.
PROXIES = "127.0.0.0/8,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7"


def client_address(scope: Scope) -> str:
    """The client's address for limits. For IPv6 it is the /64 network, because one customer has all of it."""
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or ip_network((address.packed, 64), strict=False))
    return str(address)


@dataclass(frozen=True)
class Lane:
    """Requests that share limits."""

    capacity: int  # units in use at the same time
    seconds: float | None  # how long one request may take; None: no limit

    def shares(self, client: Client) -> dict[str, int]:
        """The counters that a request of `client` adds to, each with its maximum.

        A quarter is reserved for clients with the key, and one visitor gets at most a quarter.
        """
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
        """Hold `units` of the lane. Raises `Refusal` if the lane, or the client's share of it, is full."""
        shares = self._lanes[name].shares(client) if name in self._lanes else {}
        if any(self._used[name, counter] + units > limit for counter, limit in shares.items()):
            raise Refusal.retry("too many requests of this kind are being answered")
        for counter in shares:
            self._used[name, counter] += units
        try:
            yield
        finally:
            for counter in shares:
                self._used[name, counter] -= units
                if not self._used[name, counter]:
                    del self._used[name, counter]  # or every address would stay


class RateLimit:
    """A token bucket per visitor: cost per second, and the burst allowed after a quiet time."""

    _MAX_CLIENTS = 4096  # the client whose last request is oldest is forgotten first

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit_s, self._ahead_s, self._clock = 1 / per_second, burst / per_second, clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def spend(self, client: Client, cost: float) -> None:
        """Charge a visitor; raises `Refusal` if it spends too fast. A client with the key pays nothing."""
        if client is None:
            return
        now = self._clock()
        until = max(now, self._paid_until.get(client, now)) + cost * self._unit_s
        if until > now + self._ahead_s:
            raise Refusal.retry("your address sends too many requests")
        self._paid_until[client] = until
        self._paid_until.move_to_end(client)
        if len(self._paid_until) > self._MAX_CLIENTS:
            self._paid_until.popitem(last=False)
