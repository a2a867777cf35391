"""Visitors share what a trainer does not need, and no client can flood a log."""

import asyncio
import logging
from contextlib import ExitStack

import pytest
from starlette.exceptions import HTTPException
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from space_guard.limits import PROXIES, Lane, LogLimit, client_address


@pytest.mark.finding(4)
def test_visitors_take_no_place_that_a_trainer_needs():
    """Where inference is open: of eight places one visitor has two at most, and all visitors six."""
    lane = Lane(8)

    def refused(client: str | None, wanted: int) -> bool:
        try:
            with lane.admit(client, wanted):
                return False
        except HTTPException:
            return True

    with ExitStack() as taken:
        assert refused("ada", 3)
        for visitor in ("ada", "bob", "eve"):
            taken.enter_context(lane.admit(visitor, 2))
            assert refused(visitor, 1)
        assert refused("another", 1)
        taken.enter_context(lane.admit(None, 2))
        assert refused(None, 1), "there is no ninth place"
    assert not refused(None, 8)
    assert not refused("ada", 2)


@pytest.mark.finding(10)
@pytest.mark.parametrize(
    ("peer", "told", "client"),
    [
        ("10.16.3.80", "203.0.113.9", "203.0.113.9"),  # the Hub's proxy
        ("10.16.3.80", "6.6.6.6, 203.0.113.9, 10.20.0.1", "203.0.113.9"),  # two of them, and a forged one
        ("10.16.3.80", "6.6.6.6, 2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("10.16.3.80", "x" * 9000, "unknown"),
        ("203.0.113.9", "6.6.6.6", "203.0.113.9"),  # nobody's proxy
        ("2001:db8:1:2::9", None, "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", None, "203.0.113.9"),
    ],
)
def test_a_client_is_the_address_that_the_last_proxy_saw(peer, told, client):
    seen = []

    async def app(scope, receive, send):
        seen.append(client_address(scope))

    behind = ProxyHeadersMiddleware(app, PROXIES)
    headers = [(b"x-forwarded-for", told.encode())] if told else []
    asyncio.run(behind({"type": "http", "client": (peer, 1), "headers": headers}, None, None))
    assert seen == [client]


def record(line: int) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, "uvicorn.py", line, "%s", ("x",), None)


@pytest.mark.finding(19)
@pytest.mark.finding(10)
def test_a_flood_of_one_kind_is_dropped_and_counted_and_silences_no_other():
    now = [0.0]
    limit = LogLimit(6, clock=lambda: now[0])
    assert [limit.filter(record(1)) for _ in range(1000)] == [True] * 3 + [False] * 997
    assert limit.filter(record(2))
    now[0] = 60.0
    other, first, second = record(2), record(1), record(1)
    assert all(map(limit.filter, (other, first, second)))
    said = [each.getMessage() for each in (other, first, second)]
    assert said == ["x", "(997 similar lines were dropped) x", "x"]


@pytest.mark.finding(19)
def test_a_steady_flood_has_no_more_lines_in_a_minute_than_allowed():
    now = [0.0]
    limit, logged = LogLimit(60, clock=lambda: now[0]), []
    for tick in range(1800):
        now[0] = tick / 10
        logged += [now[0]] * limit.filter(record(1))
    assert max(sum(start <= t < start + 60 for t in logged) for start in range(120)) <= 60
    assert len(logged) > 100
