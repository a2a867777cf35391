"""Slow clients and endless requests cannot use up the connections of the environment."""

import http.client
import json
import re
import select
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import httpx
import pytest

from env_space import app as service
from env_space.app import LIMITS, create_app, server_options
from env_space.settings import Settings
from tests.env_space.service import PATIENCE_S, space
from tests.support.serving import serving

pytestmark = [pytest.mark.finding(6), pytest.mark.full]

LATE = b"The request did not arrive within 0.3 s."
KEY = "four-random-words-in-a-row"
HEAD = b"POST /play HTTP/1.1\r\nHost: wordle\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: wordle\r\n\r\n"
ENDLESS = 8 << 20  # bytes that a client would go on to send


@pytest.fixture
def soon(monkeypatch):
    """Short deadlines, so that tests need not wait."""
    monkeypatch.setattr(service, "LIMITS", replace(LIMITS, request_s=0.3, unread_s=1.0))


@contextmanager
def wordle(key=""):
    with serving(create_app(Settings(key=key)), **server_options(key, 8, service.LIMITS)) as url:
        yield url


@contextmanager
def link(url, sent=b"", buffer=None):
    """A connection to the service on which this was sent."""
    address = url.removeprefix("http://").split(":")
    with socket.socket() as opened:
        opened.settimeout(PATIENCE_S)
        if buffer:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        opened.connect((address[0], int(address[1])))
        with suppress(ConnectionError):  # it may be cut off already
            opened.sendall(sent)
        yield opened


def until_the_end(opened):
    """Everything received until the service hangs up."""
    came = b""
    with suppress(ConnectionResetError):
        while part := opened.recv(1 << 16):
            came += part
    return came


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HT", LATE),
        (HEAD, LATE),
        (HEAD + b'Content-Length: 20\r\n\r\n{"seed', LATE),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", LATE),
        (HEALTH + b"GET /hea", LATE),
        (b"GET /sessions HTTP/1.1\r\nHost: w\r\nContent-Length: 9\r\n\r\n", b"401 Unauthorized"),
    ],
    ids=["silent", "line", "head", "body", "chunk", "second", "refused"],
)
def test_a_request_must_arrive_in_time(soon, sent, answer):
    with wordle(KEY) as url, link(url, sent) as opened:
        assert answer in until_the_end(opened)


@pytest.mark.parametrize(
    "begun", [b"GET /health HTTP/1.1\r\nX-Drip: ", HEAD + b"Content-Length: 9999\r\n\r\n"]
)
def test_sending_a_byte_now_and_then_does_not_extend_the_deadline(soon, begun):
    with wordle() as url, link(url, begun) as opened:
        deadline = time.monotonic() + PATIENCE_S
        while not select.select([opened], [], [], 0.01)[0]:
            assert time.monotonic() < deadline, "the service listens for ever"
            with suppress(ConnectionError):
                opened.sendall(b"x")
        assert LATE in until_the_end(opened)


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"x" * (64 << 10)),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 9000),
        (b"GET /", b"x" * (64 << 10)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ", b"x" * (64 << 10)),
        (b"", HEALTH * 1000),
    ],
    ids=["value", "headers", "path", "trailers", "pipeline"],
)
def test_an_endless_request_is_cut_off(begun, more):
    with wordle() as url, link(url, begun) as opened, pytest.raises(ConnectionError):
        send_on(opened, more)


def send_on(opened, more):
    """Send, and read what comes, as long as the service lets one."""
    for _ in range(ENDLESS // len(more)):
        opened.sendall(more)
        if select.select([opened], [], [], 0)[0]:
            opened.recv(1 << 16)


def test_a_client_that_reads_nothing_is_cut_off(soon):
    words = b"GET /words HTTP/1.1\r\nHost: wordle\r\n\r\n" * LIMITS.pipelined
    options = server_options(KEY, limits=service.LIMITS)
    visitors = options["http"].keywords["visitors"]
    with serving(create_app(Settings()), **options) as url, link(url, words, buffer=4096) as opened:
        assert opened.recv(1) == b"H"
        deadline = time.monotonic() + PATIENCE_S
        while len(visitors):
            assert time.monotonic() < deadline, "the connection is still counted"
            time.sleep(0.02)


def test_half_requests_lock_out_no_client_even_with_few_files(tmp_path):
    """260 half requests to a process that may open 256 files, during a game."""
    with (
        space(tmp_path, files=256, WORDLE_KEY=KEY) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S, headers={"X-Space-Key": KEY}) as trainer,
        ExitStack() as links,
    ):
        game = f"/sessions/{trainer.post('/sessions', json={'seed': 1020}).json()['session']}"
        for number in range(260):
            links.enter_context(link(running.url, (b"", b"GET / HT", HEAD)[number % 3]))
        move = trainer.post(f"{game}/guess", json={"word": "crane", "turn": 1})
        assert move.json()["feedback"] == "-+--+", "a client with the key stays connected"
        assert httpx.get(f"{running.url}/health", timeout=PATIENCE_S).status_code == 200
        assert game_of_another(running.url) == 201


def game_of_another(url):
    asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json", "X-Space-Key": KEY}
    asked.request("POST", "/sessions", json.dumps({"seed": 1}), headers)
    status = asked.getresponse().status
    asked.close()
    return status


def test_the_visitor_that_was_quiet_longest_is_evicted_and_the_key_stays(monkeypatch):
    monkeypatch.setattr(service, "MAX_VISITORS", 20)
    with_key = HEALTH.replace(b"\r\n\r\n", f"\r\nX-Space-Key: {KEY}\r\n\r\n".encode())
    with wordle(KEY) as url, link(url) as keyed, ExitStack() as links:
        assert answers(keyed, with_key)
        visitors = [links.enter_context(link(url)) for _ in range(20)]
        assert all(map(answers, visitors))
        assert answers(visitors[0])
        more = [links.enter_context(link(url)) for _ in range(10)]
        assert all(map(answers, more))
        assert [answers(opened) for opened in visitors] == [True] + [False] * 10 + [True] * 9
        assert answers(keyed, with_key)


def answers(opened, request=HEALTH):
    """Whether the service has not cut this connection off."""
    try:
        opened.sendall(request)
        return b"200 OK" in opened.recv(1 << 16)
    except ConnectionError:
        return False


def test_a_client_that_hangs_up_leaves_no_traceback(tmp_path):
    game = "/play/00000000-0000-0000-0000-000000000000/guess"
    with space(tmp_path) as running:
        for path in (game, "/mcp", "/play"):
            head = HEAD.replace(b"/play", path.encode())
            with link(running.url, head + b"Content-Length: 20\r\n\r\n{"):
                pass
        with link(running.url, b"nothing of HTTP\r\n\r\n") as opened:
            assert b"400" in until_the_end(opened)
    log = (tmp_path / "space.log").read_text()
    assert "Traceback" not in log
    assert len(re.findall("Invalid HTTP request", log)) == 1
