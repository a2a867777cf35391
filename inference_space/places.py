"""How much may go on at once, and how often somebody may ask: places and paces.

A trainer is known by the key. Visitors are told apart by their addresses, and none of them, nor all of them
together, can take what a trainer needs.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from inference_space.refused import come_back

Client = str | None  # a visitor's address; None: somebody with the key


@dataclass(frozen=True)
class Lane:
    """Requests that share limits: so many places, each for at most so many seconds (None: for ever)."""

    at_once: int
    seconds: float | None

    def shares(self, client: Client) -> dict[str, int]:
        """What counts this client's places -> how many that may be.

        A quarter is kept for who has the key, and one visitor gets at most a quarter.
        """
        if client is None:
            return {"all": self.at_once}
        quarter = self.at_once // 4
        return {
            "all": self.at_once,
            "visitors": self.at_once - quarter,
            f"visitor {client}": max(1, quarter),
        }


class Places:
    """The places of lanes, by their names."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._taken: Counter[tuple[str, str]] = Counter()

    def lane(self, name: str) -> Lane | None:
        """None for what is not limited."""
        return self._lanes.get(name)

    @contextmanager
    def taken(self, name: str, client: Client, places: int) -> Iterator[None]:
        """Hold places for as long as the block runs; raises `Refused` where there are not so many."""
        lane = self.lane(name)
        shares = lane.shares(client) if lane else {}
        for who, most in shares.items():
            if self._taken[name, who] + places > most:
                raise come_back(_FULL)
        self._count(name, shares, places)
        try:
            yield
        finally:
            self._count(name, shares, -places)

    def _count(self, name: str, shares: Mapping[str, int], places: int) -> None:
        for who in shares:
            self._taken[name, who] += places
            if not self._taken[name, who]:
                del self._taken[name, who]  # or every address would stay


_FULL = "as many requests of this kind as may be at once are being answered"


class Pace:
    """What each client may spend per second; who has not spent for a while may spend `burst` at once."""

    _KNOWN = 4096  # clients; who asked longest ago is forgotten first

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._each, self._ahead, self._clock = 1 / per_second, burst / per_second, clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def spend(self, client: Client, cost: float) -> None:
        """Raises `Refused` for who spends faster; who has the key may spend as much as it likes."""
        if client is None:
            return
        now = self._clock()
        until = max(now, self._paid_until.get(client, now)) + cost * self._each
        if until > now + self._ahead:
            raise come_back("too many requests come from your address")
        self._paid_until[client] = until
        self._paid_until.move_to_end(client)
        if len(self._paid_until) > self._KNOWN:
            self._paid_until.popitem(last=False)
