"""The API needs the Space's key; people on the page need none, and no visitor takes all games."""

import asyncio
import json
import logging
import re
import socket
import ssl
from functools import partial

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from env_space.app import MAX_PLAYED, create_app
from env_space.game import MAX_STORED
from env_space.settings import Settings
from env_space.watch import MAX_WATCHED, replica_headers
from space_guard.setup import SettingsError
from tests.env_space.service import PATIENCE_S, guess, sentence, service, space, start
from tests.inference_space.asking import ask_raw

KEY = "four-random-words-in-a-row"
RIGHT = {"X-Space-Key": KEY}
WRONG = {"X-Space-Key": KEY[:-1]}
UNKNOWN = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sessions"),
        ("POST", f"/sessions/{UNKNOWN}/guess"),
        ("DELETE", f"/sessions/{UNKNOWN}"),
        ("GET", "/sessions"),
        ("POST", "/sessions/"),
        ("GET", "/nowhere"),
    ],
)
def test_the_api_needs_the_key_and_says_whether_it_is_missing_or_wrong(method, path):
    client = service(key=KEY)
    missing, wrong = (client.request(method, path, json={"seed": 1}, headers=given) for given in ({}, WRONG))
    assert "send the Space's WORDLE_KEY in the header X-Space-Key" in sentence(missing, 401)
    assert "send the value of this Space's WORDLE_KEY" in sentence(wrong, 401)
    assert KEY[:-1] not in wrong.text


def test_the_key_and_an_open_api_give_full_access():
    client = service(key=KEY)
    client.headers.update(RIGHT)
    game = start(client)
    guess(client, game, "bride", 1)
    assert client.delete(game).json()["solved"]
    assert start(service(key=KEY, open=True)).startswith("/sessions/")


def test_no_route_that_plays_is_open():
    """Whatever routes the app has or gets: without the key these are all that answer, and they only look."""
    app = create_app(Settings(key=KEY))
    answers = dict[str, int]()
    for route in app.routes:
        if isinstance(route, APIRoute):
            path = re.sub("{.*?}", UNKNOWN, route.path)
            (method,) = route.methods
            answers[path] = TestClient(app).request(method, path, json={}).status_code
    closed = {path for path, status in answers.items() if status == 401}
    assert closed == {"/sessions", f"/sessions/{UNKNOWN}", f"/sessions/{UNKNOWN}/guess"}
    played = {"/play", f"/play/{UNKNOWN}", f"/play/{UNKNOWN}/guess"}
    looking = {"/", "/health", "/words", "/metrics", "/schema", "/metadata", "/watch", "/mcp", "/agents.md"}
    assert answers.keys() - closed - played == looking


@pytest.mark.parametrize(
    "path", ["/play/../sessions", "/page/../sessions", "/play/%2e%2e/sessions", "//sessions"]
)
def test_no_detour_leads_to_the_api(path):
    """As a server hands it over; a client would tidy the path up before it sends it."""
    opening = {"type": "http.request", "body": b'{"seed": 1}'}
    json = {"content-type": "application/json"}
    sent = asyncio.run(ask_raw(create_app(Settings(key=KEY)), path, opening, headers=json))
    assert sent[0]["status"] in (401, 404, 405)


@pytest.mark.full
def test_a_socket_is_refused_before_it_opens(tmp_path):
    with space(tmp_path, WORDLE_KEY=KEY) as running:
        opening = partial(connect, f"{running.url.replace('http', 'ws')}/ws", open_timeout=PATIENCE_S)
        refusals = []
        for given in ({}, WRONG):
            with pytest.raises(InvalidStatus) as refused, opening(additional_headers=given):
                pass
            refusals.append(refused.value.response)
        with opening(additional_headers=RIGHT) as socket:
            socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
            assert json.loads(socket.recv())["type"] == "observation"
    assert [refusal.status_code for refusal in refusals] == [401, 401]
    assert b"send the Space's WORDLE_KEY" in refusals[0].body
    assert b"is wrong" in refusals[1].body


@pytest.mark.finding("M11")
def test_visitors_have_a_capacity_of_their_own():
    client = service(key=KEY, max_sessions=1)
    seeds = range(MAX_PLAYED + 1)
    *games, full = (client.post("/play", json={"seed": n}) for n in seeds)
    assert {game.status_code for game in games} == {201}
    assert sentence(full, 503) == f"{MAX_PLAYED} games are in play: try again in a moment."
    client.headers.update(RIGHT)
    start(client)
    elsewhere = guess(client, f"/sessions/{games[0].json()['session']}", "crane", 1)
    assert "is unknown" in sentence(elsewhere, 404)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://me-replica.hf.space", True),
        ("https://ME-replica.HF.space/", True),
        ("https://you-replica.hf.space", False),
        ("https://mea-replica.hf.space", False),
        ("http://me-replica.hf.space", False),
        ("https://hf.space.evil.example", False),
        ("https://evilhf.space", False),
        ("https://me.hf.space@evil.example", False),
    ],
)
def test_the_hubs_token_goes_to_spaces_of_the_same_owner_only(url, sent, monkeypatch):
    monkeypatch.setenv("SPACE_ID", "me/wordle-env")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    token = {"Authorization": "Bearer hf_secret"} if sent else {}
    assert replica_headers(url, "key") == {"X-Space-Key": "key"} | token


@pytest.mark.parametrize("variable", ["WORDLE_KEY", "WORDLE_REPLICA_KEY"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(variable):
    with pytest.raises(SettingsError, match=f"{variable}: cannot be sent in a header") as refused:
        Settings.read({variable: "geheimnis ü"})
    assert "geheimnis" not in str(refused.value)
    assert "geheimnis" not in repr(Settings(key="geheimnis", replica_key="geheimnis"))


@pytest.mark.finding(10)
def test_a_game_stores_little_of_an_endless_word():
    client = service()
    novel = "X" * 16_000
    game = start(client)
    first, again = (guess(client, game, novel, 1).json() for _ in range(2))
    assert first == again
    assert first["word"] == "x" * MAX_STORED
    assert first["message"] == f"'{'x' * 20}...' has 16000 letters; a guess must have 5."
    assert "already played with another word" in sentence(guess(client, game, "y", 1), 409)


async def burst(watchers):
    """The statuses of simultaneous requests for `/watch` during many games, and of one after them."""
    with socket.create_server(("127.0.0.1", 0)) as replica:  # it answers nothing, until it is closed
        url = f"http://127.0.0.1:{replica.getsockname()[1]}"
        app = create_app(Settings(replica_url=url))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wordle") as client:
            for _ in range(MAX_PLAYED):
                await client.post("/play", json={"seed": 1})
            requests = [asyncio.create_task(client.get("/watch")) for _ in range(watchers)]
            async with asyncio.timeout(PATIENCE_S):  # until all are refused but those that may watch
                while sum(request.done() for request in requests) < watchers - MAX_WATCHED:
                    await asyncio.sleep(0.01)
            replica.close()
            answers = [*await asyncio.gather(*requests), await client.get("/watch")]
    return [answer.status_code for answer in answers]


@pytest.mark.finding(10)
def test_a_burst_watches_no_more_games_than_allowed_whatever_the_page_plays():
    *statuses, after = asyncio.run(burst(60))
    assert statuses.count(200) == MAX_WATCHED
    assert statuses.count(503) == 60 - MAX_WATCHED
    assert after == 200, "there is room again"


@pytest.mark.finding(10)
def test_certificates_are_read_once_not_for_each_watcher(monkeypatch):
    read = ssl.create_default_context
    reads = []
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: reads.append(1) or read(**given))
    client = service(replica_url="http://127.0.0.1:9")
    for _ in range(3):
        client.get("/watch")
    assert len(reads) <= 1, "each time takes the only thread a tenth of a second"


@pytest.mark.finding(10)
def test_a_client_that_leaves_before_the_first_event_makes_room():
    """The client of this app has gone before it answers."""
    app = create_app(Settings(replica_url="http://127.0.0.1:9"))
    gone = {"type": "http.disconnect"}

    async def watch():
        return [await ask_raw(app, "/watch", gone, method="GET") for _ in range(MAX_PLAYED + 1)]

    answers = asyncio.run(watch())
    assert {sent[0]["status"] for sent in answers if sent} <= {200}


@pytest.mark.finding(10)
def test_games_of_visitors_are_counted_but_not_logged(caplog):
    client = service()
    with caplog.at_level(logging.INFO, "wordle"):
        for _ in range(3):
            game = client.post("/play", json={"seed": 1}).json()["session"]
            client.delete(f"/play/{game}")
        metrics = client.get("/metrics").text
        client.delete(start(client))
    assert 'wordle_games_total{outcome="gave_up",split="train",via="page"} 3.0' in metrics
    assert [record.fields["via"] for record in caplog.records if record.name == "wordle"] == ["http"]
