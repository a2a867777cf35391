"""Finding 10: one client took every place of the page and of `/watch`, and filled the memory with words."""

import asyncio
import logging
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from env_space.app import create_app
from env_space.clients import client_of
from env_space.keys import AT_ONCE, EACH
from env_space.logs import A_MINUTE, Seldom
from env_space.server import options
from env_space.sessions import Origin, Sessions
from env_space.settings import Settings
from env_space.watch import EACH_WATCHED, MAX_WATCHED
from env_space.wordle import KEPT, Game, guesses
from tests.env.service import PATIENCE_S, seen_from, sentence, serve, start
from tests.env.test_env_sessions import TTL_S, Clock


def test_one_address_has_its_share_of_the_pages_places_and_no_more():
    async def scenario(client):
        def play(number):
            return client.post("/play", json={"seed": 1}, headers=seen_from(number))

        mine = [await play(1) for _ in range(EACH + 1)]
        others = await play(2)
        await client.delete(f"/play/{mine[0].json()['session']}")
        return mine, others, await play(1)

    mine, others, again = serve(scenario)
    assert [game.status_code for game in mine] == [201] * EACH + [429]
    assert sentence(mine[-1], 429) == f"{EACH} games of your address are in play; end one of them, or wait."
    assert mine[-1].headers["Retry-After"]
    assert (others.status_code, again.status_code) == (201, 201)


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
        seen.append(client_of(scope))

    behind = ProxyHeadersMiddleware(app, options()["forwarded_allow_ips"])
    headers = [(b"x-forwarded-for", told.encode())] if told else []
    asyncio.run(behind({"type": "http", "client": (peer, 1), "headers": headers}, None, None))
    assert seen == [client]


def test_what_is_only_repeated_does_not_keep_a_place():
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


def test_a_word_without_end_is_a_wasted_guess_of_which_a_game_keeps_little():
    novel = "X" * 16_000

    async def scenario(client):
        game = await start(client)
        moves = [
            await client.post(f"{game}/guess", json={"word": word, "turn": 1}) for word in (novel, novel, "y")
        ]
        return [moves[0].json(), moves[1].json()], sentence(moves[2], 409)

    played, conflict = serve(scenario)
    assert played[0] == played[1]
    assert played[0]["word"] == "x" * KEPT
    assert played[0]["message"] == f"'{'x' * 20}...' has 16000 letters; a guess has 5."
    assert "already played with another word" in conflict


@contextmanager
def thinking_replica():
    """A replica that answers nothing before it is let; yields its URL, how many ask it, and what lets it."""
    asking, lets = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asking.append(self.path)
            lets.wait(PATIENCE_S)
            self.send_error(503)

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asking, lets
    finally:
        lets.set()
        server.shutdown()
        server.server_close()


async def burst(client, addresses, lets):
    """The statuses of a `/watch` from each address at once; the replica waits until the rest was refused."""
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


def test_of_a_burst_only_so_many_watch_and_the_page_takes_no_place_from_them():
    with thinking_replica() as (url, asking, lets):

        async def scenario(client):
            for number in range(AT_ONCE):
                await client.post("/play", json={"seed": 1}, headers=seen_from(number))
            statuses = await burst(client, range(60), lets)
            return statuses, (await client.get("/watch")).status_code

        statuses, after = serve(scenario, replica_url=url)
    assert sorted(statuses) == [200] * MAX_WATCHED + [503] * (60 - MAX_WATCHED)
    assert len(asking) == MAX_WATCHED + 1
    assert after == 200, "the places are free again"


def test_one_address_watches_so_many_and_others_still_can():
    with thinking_replica() as (url, _, lets):

        async def scenario(client):
            return await burst(client, [1] * 54 + list(range(2, 8)), lets)

        statuses = serve(scenario, replica_url=url)
    assert statuses[:54].count(200) == EACH_WATCHED
    assert statuses[:54].count(429) == 54 - EACH_WATCHED
    assert statuses[54:] == [200] * (MAX_WATCHED - EACH_WATCHED)


def test_watching_does_not_keep_players_waiting_while_certificates_are_read(monkeypatch):
    read, reads = ssl.create_default_context, []
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: reads.append(1) or read(**given))

    async def scenario(client):
        for _ in range(3):
            await client.get("/watch")

    serve(scenario, replica_url="http://127.0.0.1:9")
    assert len(reads) <= 1, "each time takes the only thread a tenth of a second"


def test_who_leaves_before_the_first_event_gives_the_place_back():
    """The app itself is asked, by a client that has gone when it answers."""
    app, sent = create_app(Settings(replica_url="http://127.0.0.1:9")), []
    scope = {"type": "http", "method": "GET", "path": "/watch", "raw_path": b"/watch", "query_string": b""}

    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    async def watch():
        for _ in range(AT_ONCE + 1):
            await app({**scope, "headers": [], "client": ("203.0.113.9", 1)}, gone, send)

    asyncio.run(watch())
    assert set(sent) <= {200}


def test_no_visitor_fills_the_log_and_no_flood_of_one_kind_does(caplog):
    async def scenario(client):
        for _ in range(3):
            game = (await client.post("/play", json={"seed": 1})).json()["session"]
            await client.delete(f"/play/{game}")
        metrics = (await client.get("/metrics")).text
        await client.delete(await start(client))
        return metrics

    with caplog.at_level(logging.INFO, "wordle"):
        metrics = serve(scenario)
    assert 'wordle_games_total{outcome="gave_up",split="train",via="page"} 3.0' in metrics
    assert [record.fields["via"] for record in caplog.records if record.name == "wordle"] == ["http"]


def test_a_place_in_the_code_writes_so_many_lines_a_minute():
    clock = Clock()
    seldom = Seldom(clock)

    def says(line):
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "uvicorn.py", line, "%s", ("x",), None)
        return seldom.filter(record), getattr(record, "fields", {})

    flood = [says(1) for _ in range(A_MINUTE * 2)]
    assert [passed for passed, _ in flood] == [True] * A_MINUTE + [False] * A_MINUTE
    assert "are left out" in flood[A_MINUTE - 1][1]["flood"]
    assert says(2) == (True, {}), "what says something else is heard"
    clock.now += 60
    assert says(1) == (True, {})
