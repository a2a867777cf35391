"""Who may play: the API takes the key of the Space, people on the page need none."""

import asyncio
import functools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from env_space.app import create_app
from env_space.keys import AT_ONCE, replica_headers
from env_space.settings import Settings, SettingsError, settings_from
from tests.browser import watched_page
from tests.env.service import BRIDE, PATIENCE_S, seen_from, sentence, serve, space, start
from trainer.wordle import WordleEnv

KEY = "four-random-words-in-a-row"
RIGHT, WRONG = {"X-Space-Key": KEY}, {"X-Space-Key": KEY[:-1]}
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
def test_the_api_needs_the_key_and_says_which_of_both_is_wrong(method, path):
    async def scenario(client):
        return [await client.request(method, path, json={"seed": 1}, headers=given) for given in ({}, WRONG)]

    missing, wrong = serve(scenario, key=KEY)
    assert "send its WORDLE_KEY in the header X-Space-Key" in sentence(missing, 401)
    assert "compare it with its WORDLE_KEY" in sentence(wrong, 401)
    assert KEY[:-1] not in wrong.text


def test_with_the_key_everything_is_as_without_one():
    async def scenario(client):
        client.headers.update(RIGHT)
        game = await start(client)
        await client.post(f"{game}/guess", json={"word": "bride", "turn": 1})
        return (await client.delete(game)).json()["solved"]

    assert serve(scenario, key=KEY)


def test_an_open_api_needs_none():
    assert serve(start, key=KEY, open=True).startswith("/sessions/")


def test_no_route_that_plays_is_open():
    """Whatever routes the app has or gets: without the key these are all that answer, and they only look."""
    app, answers = create_app(Settings(key=KEY)), dict[str, int]()
    with TestClient(app) as client:
        for route in app.routes:
            if isinstance(route, APIRoute):
                path = route.path.replace("{session}", UNKNOWN)
                (method,) = route.methods
                answers[path] = client.request(method, path, json={}).status_code
    closed = {path for path, status in answers.items() if status == 401}
    assert closed == {"/sessions", f"/sessions/{UNKNOWN}", f"/sessions/{UNKNOWN}/guess"}
    played = {"/play", f"/play/{UNKNOWN}", f"/play/{UNKNOWN}/guess"}
    assert answers.keys() - closed - played == {
        *("/", "/health", "/words", "/metrics", "/schema", "/metadata", "/watch", "/mcp")
    }


DETOURS = ["/play/../sessions", "/page/../sessions", "/play/%2e%2e/sessions", "//sessions"]


@pytest.mark.parametrize("path", DETOURS)
def test_no_detour_leads_to_the_api(path):
    """As a server hands it over; a client would tidy the path up before it sends it."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"seed": 1}'}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    headers = [(b"content-type", b"application/json")]
    asyncio.run(create_app(Settings(key=KEY))({**scope, "headers": headers}, receive, send))
    assert sent[0]["status"] in (401, 404, 405)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A Space with a key."""
    with space(tmp_path_factory.mktemp("key"), WORDLE_KEY=KEY) as running:
        yield running.url


@pytest.mark.full
def test_a_socket_is_refused_before_it_opens(url):
    opening = functools.partial(connect, f"{url.replace('http', 'ws')}/ws", open_timeout=PATIENCE_S)
    refusals = []
    for given in ({}, WRONG):
        with pytest.raises(InvalidStatus) as refused, opening(additional_headers=given):
            pass
        refusals.append(refused.value.response)
    with opening(additional_headers=RIGHT) as socket:
        socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
        assert json.loads(socket.recv())["type"] == "observation"
    assert [refusal.status_code for refusal in refusals] == [401, 401]
    assert b"send its WORDLE_KEY" in refusals[0].body
    assert b"compare it" in refusals[1].body


@pytest.mark.full
def test_a_trainer_plays_with_its_space_key_and_is_told_when_it_is_wrong(url, monkeypatch):
    monkeypatch.setenv("SPACES", url)
    for given, said in (("", "send its WORDLE_KEY"), ("not-the-key", "compare it with its WORDLE_KEY")):
        monkeypatch.setenv("SPACE_KEY", given)
        with pytest.raises(ValueError, match=said):
            asyncio.run(trainer(url).get_reward())
    monkeypatch.setenv("SPACE_KEY", KEY)
    assert asyncio.run(trainer(url).guess("bride")) == "b1+r2+i3+d4+e5+ game over"


@pytest.mark.full
def test_in_somebody_elses_environment_a_trainer_plays_with_the_key_for_that_one(url, monkeypatch):
    monkeypatch.setenv("SPACES", "https://me-wordle-replica-1.hf.space")
    monkeypatch.setenv("SPACE_KEY", KEY)
    with pytest.raises(ValueError, match="send its WORDLE_KEY"):
        asyncio.run(trainer(url).get_reward())
    monkeypatch.setenv("ENV_KEY", KEY)
    assert asyncio.run(trainer(url).guess("bride")) == "b1+r2+i3+d4+e5+ game over"


def trainer(url):
    """A game as a trainer plays it."""
    env = WordleEnv(url)
    env.reset(seed=BRIDE)
    return env


@pytest.mark.full
def test_a_person_plays_on_the_page_of_a_space_with_a_key(browser, url):
    before = playing(url)
    with watched_page(browser, reduced_motion="reduce") as page:
        page.goto(f"{url}/#seed={BRIDE}")
        says = page.locator("#play .says")
        says.get_by_text("Guess a word of 5 letters.").wait_for()
        page.keyboard.type("bride")
        page.keyboard.press("Enter")
        says.get_by_text("On the first guess!").wait_for()
    assert playing(url) == before, "a person takes no place of the API"


def playing(url):
    return httpx.get(f"{url}/health", timeout=PATIENCE_S).json()["sessions"]


def test_visitors_have_places_of_their_own():
    async def scenario(client):
        games = [
            await client.post("/play", json={"seed": seed}, headers=seen_from(seed))
            for seed in range(AT_ONCE + 1)
        ]
        opened = await client.post("/sessions", json={"seed": 1}, headers=RIGHT)
        elsewhere = await client.post(
            f"/sessions/{games[0].json()['session']}/guess", json={"word": "crane", "turn": 1}, headers=RIGHT
        )
        return [game.status_code for game in games[:-1]], games[-1], opened, elsewhere

    games, full, opened, elsewhere = serve(scenario, key=KEY, max_sessions=1)
    assert set(games) == {201}
    assert sentence(full, 503) == f"All {AT_ONCE} places are taken; try again in a moment."
    assert opened.status_code == 201
    assert "is unknown" in sentence(elsewhere, 404)


def test_a_watched_replica_gets_its_key():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append({name.lower(): value for name, value in self.headers.items()})
            self.send_error(503)

        def log_message(self, *_):
            """Say nothing."""

    async def scenario(client):
        return (await client.get("/watch")).text

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        events = serve(scenario, key=KEY, replica_url=url, replica_key="the-replica's-own")
    finally:
        server.shutdown()
        server.server_close()
    assert asked[0]["x-space-key"] == "the-replica's-own"
    assert "authorization" not in asked[0]
    assert "the-replica's-own" not in events


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
    assert replica_headers(url, "key") == {"X-Space-Key": "key"} | (
        {"Authorization": "Bearer hf_secret"} if sent else {}
    )


@pytest.mark.parametrize("variable", ["WORDLE_KEY", "WORDLE_REPLICA_KEY"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_told(variable):
    with pytest.raises(SettingsError, match=f"{variable} cannot be sent in a header") as refused:
        settings_from({variable: "geheimnis ü"})
    assert "geheimnis" not in str(refused.value)
    assert "geheimnis" not in repr(Settings(key="geheimnis", replica_key="geheimnis"))
