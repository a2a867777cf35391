"""`python -m env_space.app` as a Space runs it: real processes and sockets, many games, slow clients."""

import asyncio
import json
import re
import select
import socket
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from env_space.app import SETUP, create_app, server_options
from env_space.settings import Settings
from tests.env_space.players import HttpPlayer, play_together
from tests.env_space.service import PATIENCE_S, Space, space
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


KEY = "four-random-words-in-a-row"
HEAD = b"POST /play HTTP/1.1\r\nHost: wordle\r\nContent-Type: application/json\r\n"
ENDLESS = 8 << 20  # bytes that a client would go on to send


@contextmanager
def link(url, sent=b""):
    """A connection to the service on which this was sent."""
    address = url.removeprefix("http://").split(":")
    with socket.socket() as opened:
        opened.settimeout(PATIENCE_S)
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


@pytest.fixture(scope="module")
def wordle(tmp_path_factory):
    with space(tmp_path_factory.mktemp("wordle"), WORDLE_KEY=KEY) as running:
        yield running.url


@pytest.mark.finding("N1")
@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"x" * (64 << 10)),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 9000),
        (b"GET /", b"x" * (64 << 10)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ", b"x" * (64 << 10)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 9000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 9000),
    ],
    ids=["value", "headers", "path", "trailer", "trailers", "body"],
)
def test_an_endless_request_is_cut_off(wordle, begun, more):
    with link(wordle, begun) as opened, pytest.raises(ConnectionError):
        send_on(opened, more)


def send_on(opened, more):
    """Send, and read what comes, as long as the service lets one."""
    for _ in range(ENDLESS // len(more)):
        opened.sendall(more)
        if select.select([opened], [], [], 0)[0]:
            opened.recv(1 << 16)


UPGRADE = b"Host: w\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
UPGRADE += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.finding("M2")
@pytest.mark.parametrize(
    "head",
    [
        b"POST /ws HTTP/1.1\r\n" + UPGRADE,
        b"GET /ws HTTP/1.1\r\nContent-Length: 5\r\n" + UPGRADE,
        b"GET /ws HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + UPGRADE,
        b"GET /ws HTTP/1.1\r\nX-Long: " + b"x" * 9000 + b"\r\n" + UPGRADE,
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n" + UPGRADE,
        b"GET /ws HTTP/1.1\r\n" + UPGRADE,
    ],
    ids=["post", "body", "chunks", "long header", "long path", "no key"],
)
def test_a_handshake_that_cannot_succeed_ends_its_connection(wordle, head):
    with link(wordle, head + b"\r\n") as opened:
        assert b" 101 " not in until_the_end(opened)


CHUNKS = b" HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_that_breaks_http_leaves_no_traceback(tmp_path):
    """At once, while the app waits for the body, and after the app has answered."""
    with space(tmp_path, WORDLE_KEY=KEY) as running:
        for path in (b"/sessions", b"/nothing", b"/play"):
            with link(running.url, b"POST " + path + CHUNKS + b"no chunk\r\n") as opened:
                assert b"400 Bad Request" in until_the_end(opened)
        with link(running.url, b"POST /play" + CHUNKS) as opened:
            time.sleep(0.3)
            opened.sendall(b"no chunk\r\n")
            assert until_the_end(opened).count(b"HTTP/1.1") == 1
        with link(running.url, b"POST /nothing" + CHUNKS) as opened:
            assert b"401 Unauthorized" in opened.recv(1 << 16)
            with suppress(ConnectionError):
                opened.sendall(b"no chunk\r\n" * 9)
            assert b"HTTP/1.1" not in until_the_end(opened)
        assert httpx.get(f"{running.url}/health").status_code == 200
    assert "Traceback" not in (tmp_path / "space.log").read_text()


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
    with serving(create_app(Settings(key=KEY)), **server_options()) as url:
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
