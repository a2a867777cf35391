"""The HTTP API: games as a trainer plays them, and the refusals of wrong requests."""

import asyncio
from uuid import UUID, uuid4

import httpx
import pytest

from env_space.app import REAP_EVERY_S, create_app
from env_space.game import answers, secret_for
from env_space.settings import Settings
from tests import idle_time
from tests.env_space.service import BRIDE, sentence, serve, start

NOTHING = dict.fromkeys(["solved", "greens", "yellows", "repetition", "invalid", "gave_up"], 0)


def test_a_game_from_opening_to_reward():
    async def scenario(client):
        opened = await client.post("/sessions", json={"seed": BRIDE})
        assert opened.json()["observation"] == "Play Wordle."
        assert (opened.json()["max_guesses"], opened.json()["length"]) == (6, 5)
        game = f"/sessions/{opened.json()['session']}"
        first = (await client.post(f"{game}/guess", json={"word": "crane", "turn": 1})).json()
        last = (await client.post(f"{game}/guess", json={"word": "bride", "turn": 2})).json()
        return first, last, (await client.delete(game)).json()

    first, last, closed = serve(scenario)
    assert first == {
        "turn": 1,
        "word": "crane",
        "observation": "c1-r2+a3-n4-e5+",
        "feedback": "-+--+",
        "message": "",
        "valid": True,
        "done": False,
        "solved": False,
        "reward": pytest.approx(0.08),
        "reward_parts": {**NOTHING, "greens": pytest.approx(0.08)},
        "secret": "",
    }
    assert (last["done"], last["solved"], last["secret"]) == (True, True, "bride")
    assert last["reward"] == pytest.approx(1.4)
    assert closed == {
        "solved": True,
        "turns": 2,
        "reward": last["reward"],
        "reward_parts": last["reward_parts"],
        "secret": "bride",
    }


def test_a_retried_opening_and_move_and_close_happen_once():
    async def scenario(client):
        opening = {"seed": BRIDE, "id": str(uuid4())}
        opened = [(await client.post("/sessions", json=opening)).json() for _ in range(2)]
        game = f"/sessions/{opening['id']}"
        moves = [
            (await client.post(f"{game}/guess", json={"word": "crane", "turn": 1})).json() for _ in range(2)
        ]
        playing = (await client.get("/health")).json()["sessions"]
        closed = [(await client.delete(game)).json() for _ in range(2)]
        return opened, moves, playing, closed

    opened, moves, playing, closed = serve(scenario)
    assert opened[0] == opened[1]
    assert moves[0] == moves[1]
    assert playing == 1
    assert closed[0] == closed[1]
    assert closed[0]["turns"] == 1
    assert closed[0]["reward_parts"]["gave_up"] == -0.2


def test_members_of_a_group_play_the_secret_of_their_seed():
    secret = secret_for(11, answers(40)[:36])

    async def scenario(client):
        games = [await start(client, seed=11) for _ in range(8)]
        guesses = [client.post(f"{game}/guess", json={"word": secret, "turn": 1}) for game in games]
        return [response.json()["solved"] for response in await asyncio.gather(*guesses)]

    assert serve(scenario, answers=40) == [True] * 8


def test_a_full_service_says_when_to_retry():
    async def scenario(client):
        game = await start(client)
        full = await client.post("/sessions", json={"seed": 1})
        await client.delete(game)
        await start(client)
        return sentence(full, 503), full.headers["Retry-After"]

    detail, retry_after = serve(scenario, max_sessions=1)
    assert detail.startswith("1 games are in play")
    assert int(retry_after) >= 1


def over_time(scenario, **settings):
    """Run `scenario(client)` against a running service whose clock jumps over waiting times."""

    async def run():
        app = create_app(Settings(**settings), clock=asyncio.get_running_loop().time)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://wordle") as client,
        ):
            return await scenario(client)

    return idle_time.run(run())


def test_an_expired_session_is_gone():
    async def scenario(client):
        game = await start(client)
        await asyncio.sleep(600)
        return sentence(await client.post(f"{game}/guess", json={"word": "crane", "turn": 1}), 404)

    assert "expired after 600 s without a move; POST /sessions starts a new one" in over_time(scenario)


def test_expired_sessions_are_reaped_while_no_request_comes():
    async def scenario(client):
        await start(client)
        playing = []
        for seconds in (0, 59, REAP_EVERY_S + 1):
            await asyncio.sleep(seconds)
            playing.append((await client.get("/health")).json()["sessions"])
        return playing

    assert over_time(scenario, session_ttl_s=60) == [1, 1, 0]


def test_words_are_the_possible_secrets():
    async def scenario(client):
        return (await client.get("/words")).json()

    assert serve(scenario, answers=20) == {
        "answers": list(answers(20)),
        "held_out": list(answers(20)[18:]),
        "length": 5,
        "max_guesses": 6,
    }


def test_what_the_service_offers_is_documented():
    async def scenario(client):
        docs = await client.get("/docs")
        return docs.status_code, (await client.get("/openapi.json")).json()["paths"]

    docs_status, paths = serve(scenario)
    assert docs_status == 200
    sessions = {"/sessions", "/sessions/{session}/guess", "/sessions/{session}"}
    assert paths.keys() == sessions | {"/words", "/health", "/schema", "/metadata", "/watch"}
    move = paths["/sessions/{session}/guess"]["post"]
    assert move["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Guess")
    assert move["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Move")


def test_each_refused_request_has_its_status_and_names_the_fix():
    async def scenario(client):
        game, unknown = await start(client), f"/sessions/{UUID(int=0)}"

        def guess(at, word, turn):
            return client.post(f"{at}/guess", json={"word": word, "turn": turn})

        await guess(game, "crane", 1)
        changed, skipped = await guess(game, "bride", 1), await guess(game, "bride", 3)
        await guess(game, "bride", 2)
        late, missing = await guess(game, "crane", 3), await guess(unknown, "crane", 1)
        conflicts = [sentence(refusal, 409) for refusal in (changed, skipped, late)]
        return [*conflicts, sentence(missing, 404), sentence(await client.delete(unknown), 404)]

    changed, skipped, late, *unknown = serve(scenario)
    assert "already played with another word, 'crane'" in changed
    assert "the next turn is 2" in skipped
    assert late == "The game ended after turn 2; start a new one to guess again."
    assert all("POST /sessions starts a new one" in detail for detail in unknown)


JSON = {"Content-Type": "application/json"}

MALFORMED = [
    (b'{"word": "crane"}', 422, "'turn'"),
    (b'{"turn": 1}', 422, "'word'"),
    (b'{"word": null, "turn": 1}', 422, "'word'"),
    (b'{"word": "crane", "turn": 0}', 422, "'turn'"),
    (b'{"word": "crane", "turn": "1"}', 422, "'turn'"),
    (b'{"word": "crane", "turn": NaN}', 422, "'turn'"),
    (b'{"word": "crane", "turn": 1e999}', 422, "'turn'"),
    (b'{"word": "crane", "turn": 1, "extra": 1}', 422, "'extra'"),
    (b'{"word": "\\ud800", "turn": 1}', 422, "not JSON"),
    (b'{"word": "crane", "turn": 1, "\\ud800": 1}', 422, "not JSON"),
    (b"{", 422, "not JSON"),
    (b"\xff\xfe\x00", 422, "not JSON"),
    (b"", 422, "not JSON"),
    (b"null", 422, "JSON object"),
    (b"[]", 422, "JSON object"),
    (b'{"word": "crane", "turn": ' + b"9" * 5000 + b"}", 422, "not JSON"),
    (b"[" * 9000, 422, "not JSON"),
    (b" " * 100_000, 413, "at most 16384 bytes"),
]


@pytest.mark.parametrize(("body", "status", "names"), MALFORMED)
def test_a_malformed_guess_is_refused_with_a_sentence_and_costs_no_turn(body, status, names):
    async def scenario(client):
        game = await start(client)
        refusal = await client.post(f"{game}/guess", content=body, headers=JSON)
        return sentence(refusal, status), (await client.delete(game)).json()["turns"]

    detail, turns = serve(scenario)
    assert names in detail
    assert turns == 0


@pytest.mark.parametrize(
    ("opening", "names"),
    [
        ({}, "'seed'"),
        ({"seed": True}, "'seed'"),
        ({"seed": 1.5}, "'seed'"),
        ({"seed": 2**53}, "'seed'"),
        ({"seed": 1, "id": "mine"}, "'id'"),
        ({"seed": 1, "split": "test"}, "'split'"),
        ({"seed": 1, "sead": 2}, "'sead'"),
    ],
)
def test_a_malformed_opening_is_refused_with_a_sentence(opening, names):
    async def scenario(client):
        return sentence(await client.post("/sessions", json=opening), 422)

    assert names in serve(scenario)


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 422, "not JSON"),
        (b"\xff\xfe\x00", 400, "could not be parsed"),
        (b"[" * 9000, 400, "could not be parsed"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "could not be parsed"),
        (b" " * 100_000, 413, "at most 16384 bytes"),
    ],
)
def test_an_opening_that_is_not_json_is_refused_with_a_sentence(body, status, names):
    async def scenario(client):
        plain = await client.post("/sessions", content=b'{"seed": 1}')
        assert "Content-Type: application/json" in sentence(plain, 422)
        return sentence(await client.post("/sessions", content=body, headers=JSON), status)

    assert names in serve(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/sessions", 405), ("DELETE", "/sessions/mine", 422)],
)
def test_a_wrong_address_is_refused_with_a_sentence(method, path, status):
    async def scenario(client):
        return sentence(await client.request(method, path), status)

    assert "GET /docs" in serve(scenario)
