"""`python -m env_space.app` as a Space runs it: real processes and sockets, many games, slow clients."""

import asyncio
import json
import re
import select
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from env_space import app as service
from env_space.app import LIMITS, SETUP, create_app, server_options
from env_space.settings import Settings
from tests.env_space.players import HttpPlayer, play_together
from tests.env_space.service import PATIENCE_S, Space, space
from tests.support import waiting
from tests.support.serving import serving

pytestmark = pytest.mark.full


def metrics(client):
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def play(client, secret, *words, seed=5):
    session = client.post("/sessions", json={"seed": seed}).json()["session"]
    for turn, word in enumerate([*words, secret], 1):
        move = client.post(f"/sessions/{session}/guess", json={"word": word, "turn": turn}).json()
    return move


def test_games_are_counted_for_prometheus_and_logged_as_one_line_of_json_each(tmp_path):
    with (
        space(tmp_path, WORDLE_ANSWERS="1") as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        [secret] = client.get("/words").json()["answers"]
        assert play(client, secret)["reward_parts"]["solved"] == 1.25
        play(client, secret, "zonal", "zonal", "zzzzz")
        play(client, "zonal", *["zzzzz"] * 5)
        client.delete(f"/sessions/{client.post('/sessions', json={'seed': 1}).json()['session']}")
        client.post("/sessions", json={"seed": 1})
        seen = metrics(client)
    games = 'wordle_games_total{{outcome="{}",split="train",via="http"}}'.format
    assert [seen[games(how)] for how in ("solved", "lost", "gave_up")] == [2, 1, 1]
    guesses = 'wordle_guesses_total{{kind="{}"}}'.format
    assert [seen[guesses(kind)] for kind in ("new", "repeated", "invalid")] == [4, 1, 6]
    assert (seen["wordle_active_sessions"], seen["wordle_max_sessions"]) == (1, 1024)
    assert seen['wordle_move_seconds_count{via="http"}'] == 11

    lines = [json.loads(line) for line in (tmp_path / "space.log").read_text().splitlines()]
    games = [line for line in lines if line["message"] == "game ended"]
    assert [game["outcome"] for game in games] == ["solved", "solved", "lost", "gave_up"]
    assert (games[1]["turns"], games[1]["repeated"], games[1]["invalid"], games[1]["seed"]) == (4, 1, 1, 5)
    assert games[1]["reward"] == pytest.approx(sum(games[1]["reward_parts"].values()))
    assert "stopped with 1 games in play" in [line["message"] for line in lines]


def test_a_stop_lets_the_request_in_hand_finish_and_is_quick(tmp_path):
    with space(tmp_path) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = b'{"seed": 1}'
        head = (
            f"POST /sessions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection((host, port)) as link:
            link.settimeout(PATIENCE_S)
            link.sendall(head.encode() + body[:5])
            assert link.recv(100).startswith(b"HTTP/1.1 100"), "it has the request in hand and asks for more"
            running.process.terminate()
            running.says("Shutting down")
            link.sendall(body[5:])
            assert link.recv(100).startswith(b"HTTP/1.1 201")
        running.process.wait(PATIENCE_S)
    assert "timeout graceful shutdown exceeded" not in (tmp_path / "space.log").read_text()


def test_many_games_at_once_over_plain_http(tmp_path):
    with space(tmp_path, WORDLE_MAX_SESSIONS="128") as running:
        assert asyncio.run(play_together(HttpPlayer, running.url, games=128)) == []


def test_a_wrong_setting_stops_the_start_with_a_sentence(tmp_path):
    stopped = Space(tmp_path / "log", WORDLE_ANSWERS="1000000")
    assert stopped.process.wait(PATIENCE_S) == 1
    said = "The Wordle Space cannot start: correct these variables: WORDLE_ANSWERS: there are only"
    assert stopped.stop().startswith(said)
    assert "Traceback" not in stopped.stop()


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
    with serving(create_app(Settings(key=key)), **server_options(key, 8)) as url:
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


@pytest.mark.finding(6)
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HT", LATE),
        (HEAD, LATE),
        (HEAD + b'Content-Length: 20\r\n\r\n{"seed', LATE),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", LATE),
        (HEALTH + b"GET /hea", b"400 Bad Request"),
        (b"GET /sessions HTTP/1.1\r\nHost: w\r\nContent-Length: 9\r\n\r\n", b"401 Unauthorized"),
    ],
    ids=["silent", "line", "head", "body", "chunk", "pipelined", "refused"],
)
def test_a_request_must_arrive_in_time(soon, sent, answer):
    with wordle(KEY) as url, link(url, sent) as opened:
        assert answer in until_the_end(opened)


@pytest.mark.finding(6)
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


@pytest.mark.finding(6)
@pytest.mark.finding("N1")
@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"x" * (64 << 10)),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 9000),
        (b"GET /", b"x" * (64 << 10)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ", b"x" * (64 << 10)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 9000),
        (b"", HEALTH * 1000),
    ],
    ids=["value", "headers", "path", "trailer", "trailers", "pipeline"],
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


@pytest.mark.finding(6)
def test_a_client_that_reads_nothing_is_cut_off(soon):
    words = b"GET /words HTTP/1.1\r\nHost: wordle\r\n\r\n"
    options = server_options(KEY)
    visitors = options["http"].visitors
    with serving(create_app(Settings()), **options) as url, link(url, words, buffer=4096) as opened:
        assert opened.recv(1) == b"H"
        waiting.soon(lambda: not visitors, "the connection is still counted")


@pytest.mark.finding(6)
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
        another = httpx.post(f"{running.url}/sessions", json={"seed": 1}, headers=trainer.headers)
        assert another.status_code == 201


@pytest.mark.finding(6)
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


@pytest.mark.finding(20)
def test_every_answer_has_the_safe_headers():
    with serving(create_app(Settings(key=KEY)), **server_options(KEY)) as url:
        for method, path in [("GET", "/"), ("GET", "/page/play.js"), ("GET", "/words"), ("GET", "/docs")]:
            assert_safe(httpx.request(method, url + path, timeout=PATIENCE_S), 200)
        assert_safe(httpx.post(f"{url}/sessions", timeout=PATIENCE_S), 401)
        assert_safe(httpx.get(f"{url}/page/nothing", timeout=PATIENCE_S), 404)
        assert "default-src 'self';" in httpx.get(url, timeout=PATIENCE_S).headers["content-security-policy"]
    with serving(SETUP.app({"WORDLE_KEY": "not set"}), **server_options()) as url:
        assert_safe(httpx.get(url, timeout=PATIENCE_S), 200)


def assert_safe(answer, status):
    assert answer.status_code == status
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors https://huggingface.co" in answer.headers.get_list("content-security-policy")


app = create_app(Settings(max_sessions=100_000))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_service_fail(case):
    response = case.call_and_validate()
    if response.status_code >= 400:
        assert response.json()["detail"].endswith(".")
