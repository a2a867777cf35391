"""What the guard of both Spaces lets through: listed routes, the key, and bodies that are small and quick."""

import asyncio
import json
from collections import Counter

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from space_guard.guard import BODY_S, KEYLESS_PER_S, Guard, Route
from tests.inference_space.asking import ask_raw, echo, running

KEY = "four-random-words-in-a-row"
RIGHT = {"X-Space-Key": KEY}
ROUTES = (
    Route("/open(/.*)?", method=None, max_body=100),
    Route("/read"),
    Route("/(read|write)", "POST", keyed=True, max_body=10),
)


def refuse(refusal: HTTPException) -> PlainTextResponse:
    return PlainTextResponse(refusal.detail, refusal.status_code, refusal.headers)


async def answer(request, _):
    return await echo(request)


def ask(path: str, *parts: bytes, ended: bool = True, method: str = "POST", headers=(), key: str = KEY):
    """Status, headers and body of the answer to a request whose body comes in `parts`."""
    app = Starlette(exception_handlers={404: answer})
    guard = Guard(app, routes=ROUTES, key=key, secret="A_KEY", refuse=refuse)
    body = parts or (b"",)
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    messages[-1]["more_body"] = not ended
    start, content = running(lambda: ask_raw(guard, path, *messages, method=method, headers=headers))
    return start["status"], dict(start["headers"]), content["body"].decode()


def test_a_listed_route_gets_its_whole_body_at_once():
    status, _, content = ask("/write", b"12345", b"67890", headers=RIGHT)
    assert (status, json.loads(content)["body"]) == (200, "1234567890")
    assert ask("/open/anything", b"x", method="PUT")[0] == 200
    assert ask("/read", method="GET")[0] == 200


@pytest.mark.parametrize("path", ["/", "/reading", "/read/", "//read", "/%72ead", "/x/../read", "/opened"])
def test_what_is_not_listed_does_not_pass(path):
    assert ask(path, method="GET")[0] == 404


def test_a_route_takes_its_methods_only():
    status, headers, content = ask("/read", method="PUT")
    assert (status, headers[b"allow"]) == (405, b"GET, POST")
    assert "GET and POST only" in content


def test_a_keyed_route_needs_the_key_and_says_whether_it_is_missing_or_wrong():
    status, _, content = ask("/write", b"x")
    assert (status, "send the Space's A_KEY in the header X-Space-Key" in content) == (401, True)
    for wrong in (KEY[:-1], KEY + "x", KEY.upper(), "\xff"):
        status, headers, content = ask("/write", b"x", headers={"X-Space-Key": wrong})
        assert (status, "is wrong" in content, headers[b"connection"]) == (401, True, b"close")
        assert wrong not in content
    assert ask("/write", b"x", headers={"Authorization": f"Bearer {KEY}"})[0] == 401
    assert ask("/write", b"x", headers=RIGHT)[0] == 200
    assert ask("/write", b"x", key="")[0] == 200, "where no key is set, none is needed"


@pytest.mark.finding(4)
@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 10, b"x"), (b"x",) * 11, (b"x" * (20 << 20),)])
def test_a_body_that_is_too_large_is_refused_however_it_comes(parts):
    status, headers, content = ask("/write", *parts, headers=RIGHT)
    assert (status, headers[b"connection"]) == (413, b"close")
    assert "at most 10 bytes" in content
    assert ask("/read", b"x", method="GET")[0] == 413


@pytest.mark.finding(6)
@pytest.mark.parametrize("parts", [(), (b"x",), (b"x",) * 5])
def test_a_body_that_does_not_arrive_in_time_is_given_up(parts):
    status, headers, content = ask("/write", *parts, ended=False, headers=RIGHT)
    assert (status, headers[b"connection"]) == (408, b"close")
    assert f"within {BODY_S:g} s" in content


def test_a_body_beyond_the_limit_is_not_read_for_ever():
    assert ask("/write", *[b"x" * (1 << 20)] * 12, ended=False, headers=RIGHT)[0] == 413


def test_an_upgrade_that_the_server_did_not_take_is_refused():
    status, _, content = ask("/open", method="GET", headers={"Upgrade": "WebSocket", "Connection": "upgrade"})
    assert (status, "no WebSocket" in content) == (400, True)


def seconds_of_a_flood(count: int, path: str, headers=()) -> tuple[list[float], list[int]]:
    """When each of `count` requests that come at the same moment is answered, and with which status."""
    routes = (Route("/open"), Route("/health"))
    app = Starlette(exception_handlers={404: answer})
    guard = Guard(app, routes=routes, key=KEY, secret="A_KEY", refuse=refuse)
    empty = {"type": "http.request", "body": b"", "more_body": False}

    async def ask_once() -> tuple[float, int]:
        start, _ = await ask_raw(guard, path, empty, method="GET", headers=headers)
        return asyncio.get_running_loop().time(), start["status"]

    async def ask_all() -> tuple[list[float], list[int]]:
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask_once() for _ in range(count)))
        return [at - began for at, _ in answers], [status for _, status in answers]

    return running(ask_all)


@pytest.mark.finding(6)
def test_a_flood_without_the_key_is_spaced_out_and_its_end_is_refused():
    seconds, statuses = seconds_of_a_flood(KEYLESS_PER_S * 20, "/open")
    assert max(seconds[:KEYLESS_PER_S]) < 0.1, "one page may need many requests at once"
    answered = [at for at, status in zip(seconds, statuses, strict=True) if status == 200]
    each_second = Counter(map(int, answered[KEYLESS_PER_S:])).values()
    assert all(count <= KEYLESS_PER_S * 1.1 for count in each_second)
    assert statuses.count(503) == pytest.approx(KEYLESS_PER_S * 9, rel=0.02), (
        "nobody waits for more than 10 s"
    )
    assert set(statuses) == {200, 503}


@pytest.mark.finding(6)
@pytest.mark.parametrize(("path", "headers"), [("/open", RIGHT), ("/health", {})])
def test_clients_with_the_key_and_probes_of_the_platform_wait_for_nobody(path, headers):
    seconds, statuses = seconds_of_a_flood(KEYLESS_PER_S * 20, path, headers)
    assert (max(seconds) < 0.1, set(statuses)) == (True, {200})
