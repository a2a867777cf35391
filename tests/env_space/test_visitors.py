"""One client can take neither all games of the page and of `/watch`, nor the memory."""

import asyncio
import logging
import ssl
import threading
from contextlib import contextmanager
from uuid import uuid4

import httpx
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from env_space.app import MAX_PLAYED, MAX_PLAYED_EACH, create_app
from env_space.game import MAX_STORED, Game, guesses
from env_space.sessions import Origin, Sessions
from env_space.settings import Settings
from env_space.watch import MAX_WATCHED, MAX_WATCHED_EACH
from space_guard.limits import PROXIES
from tests.env_space.service import PATIENCE_S, answering, guess, seen_from, sentence, service, start
from tests.env_space.test_sessions import TTL_S, Clock

pytestmark = pytest.mark.finding(10)


def test_one_address_gets_only_its_share_of_the_pages_games():
    client = service()

    def play(number):
        return client.post("/play", json={"seed": 1}, headers=seen_from(number))

    mine, others = [play(1) for _ in range(MAX_PLAYED_EACH + 1)], play(2)
    client.delete(f"/play/{mine[0].json()['session']}")
    again = play(1)
    assert [game.status_code for game in mine] == [201] * MAX_PLAYED_EACH + [429]
    assert (
        sentence(mine[-1], 429)
        == f"{MAX_PLAYED_EACH} games of your address are in play; end one of them, or wait."
    )
    assert mine[-1].headers["Retry-After"]
    assert (others.status_code, again.status_code) == (201, 201)


def test_repeated_requests_do_not_keep_a_game_alive():
    clock = Clock()
    sessions, id = Sessions(1, TTL_S, clock=clock), uuid4()

    def opening():
        return sessions.open(id, Origin(1), Game("bride", guesses()))

    opening()
    clock.now += TTL_S / 2
    sessions.play(id, 1, "crane")
    clock.now += TTL_S - 1
    sessions.play(id, 1, "crane")
    opening()
    assert len(sessions) == 1
    clock.now += 1
    sessions.reap()
    assert len(sessions) == 0


def test_a_game_stores_little_of_an_endless_word():
    client, novel = service(), "X" * 16_000
    game = start(client)
    first, again = (guess(client, game, novel, 1).json() for _ in range(2))
    assert first == again
    assert first["word"] == "x" * MAX_STORED
    assert first["message"] == f"'{'x' * 20}...' has 16000 letters; a guess has 5."
    assert "already played with another word" in sentence(guess(client, game, "y", 1), 409)


@contextmanager
def thinking_replica():
    """A replica that answers nothing before `lets` is set; yields its URL, its requests, and `lets`."""
    asking, lets = [], threading.Event()

    def answer(request):
        asking.append(request.path)
        lets.wait(PATIENCE_S)
        request.send_error(503)

    with answering(answer) as url:
        try:
            yield url, asking, lets
        finally:
            lets.set()


def serve(scenario, url):
    """Run `scenario(client)` against a fresh service that watches the replica at `url`."""

    async def run():
        app = ProxyHeadersMiddleware(create_app(Settings(replica_url=url)), PROXIES)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://wordle") as client:
            return await scenario(client)

    return asyncio.run(run())


async def burst(client, addresses, lets):
    """The statuses of simultaneous requests for `/watch`; the replica waits until the rest is refused."""
    requests = [asyncio.create_task(client.get("/watch", headers=seen_from(n))) for n in addresses]
    refused, _ = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    while len(refused) < len(addresses) - MAX_WATCHED:
        done, _ = await asyncio.wait(
            set(requests) - refused, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S
        )
        assert done, "more are watched than may be"
        refused |= done
    lets.set()
    return [(await request).status_code for request in requests]


def test_a_burst_watches_no_more_games_than_allowed_whatever_the_page_plays():
    with thinking_replica() as (url, asking, lets):

        async def scenario(client):
            for number in range(MAX_PLAYED):
                await client.post("/play", json={"seed": 1}, headers=seen_from(number))
            statuses = await burst(client, range(60), lets)
            return statuses, (await client.get("/watch")).status_code

        statuses, after = serve(scenario, url)
    assert sorted(statuses) == [200] * MAX_WATCHED + [503] * (60 - MAX_WATCHED)
    assert len(asking) == MAX_WATCHED + 1
    assert after == 200, "there is room again"


def test_one_address_watches_its_share_and_others_still_can():
    with thinking_replica() as (url, _, lets):

        async def scenario(client):
            return await burst(client, [1] * 54 + list(range(2, 8)), lets)

        statuses = serve(scenario, url)
    assert statuses[:54].count(200) == MAX_WATCHED_EACH
    assert statuses[:54].count(429) == 54 - MAX_WATCHED_EACH
    assert statuses[54:] == [200] * (MAX_WATCHED - MAX_WATCHED_EACH)


def test_certificates_are_read_once_not_for_each_watcher(monkeypatch):
    read, reads = ssl.create_default_context, []
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: reads.append(1) or read(**given))

    client = service(replica_url="http://127.0.0.1:9")
    for _ in range(3):
        client.get("/watch")
    assert len(reads) <= 1, "each time takes the only thread a tenth of a second"


def test_a_client_that_leaves_before_the_first_event_makes_room():
    """The client of this app has gone before it answers."""
    app, sent = create_app(Settings(replica_url="http://127.0.0.1:9")), []
    scope = {"type": "http", "method": "GET", "path": "/watch", "raw_path": b"/watch", "query_string": b""}

    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    async def watch():
        for _ in range(MAX_PLAYED + 1):
            await app({**scope, "headers": [], "client": ("203.0.113.9", 1)}, gone, send)

    asyncio.run(watch())
    assert set(sent) <= {200}


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
