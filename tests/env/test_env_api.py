"""The service through its ASGI interface: what a trainer sends, and what it is told when it is wrong."""

import asyncio
from uuid import UUID, uuid4

import httpx
import pytest

from env_space.app import REAP_EVERY_S, create_app
from env_space.settings import Settings
from env_space.wordle import answers, secret_for
from tests import idle_time
from tests.env.service import BRIDE, sentence, serve, start

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


def test_another_word_for_a_played_turn_is_a_conflict():
    async def scenario(client):
        game = await start(client)
        await client.post(f"{game}/guess", json={"word": "crane", "turn": 1})
        changed = await client.post(f"{game}/guess", json={"word": "bride", "turn": 1})
        skipped = await client.post(f"{game}/guess", json={"word": "bride", "turn": 3})
        return sentence(changed, 409), sentence(skipped, 409)

    changed, skipped = serve(scenario)
    assert "already played with another word, 'crane'" in changed
    assert "the next turn is 2" in skipped


def test_no_guess_after_the_end():
    async def scenario(client):
        game = await start(client)
        await client.post(f"{game}/guess", json={"word": "bride", "turn": 1})
        return sentence(await client.post(f"{game}/guess", json={"word": "crane", "turn": 2}), 409)

    assert serve(scenario) == "The game ended after turn 1; start a new one to guess again."


def test_an_invalid_word_is_a_move_with_a_message():
    async def scenario(client):
        game = await start(client)
        return (await client.post(f"{game}/guess", json={"word": "x" * 9000, "turn": 1})).json()

    move = serve(scenario)
    assert (move["valid"], move["observation"], move["turn"]) == (False, "not a word", 1)
    assert move["message"] == f"'{'x' * 20}...' has 9000 letters; a guess has 5."
    assert move["reward_parts"] == {**NOTHING, "invalid": -0.05}


def test_members_of_a_group_play_the_secret_of_their_seed():
    secret = secret_for(11, answers(40)[:36])

    async def scenario(client):
        games = [await start(client, seed=11) for _ in range(8)]
        guesses = [client.post(f"{game}/guess", json={"word": secret, "turn": 1}) for game in games]
        return [response.json()["solved"] for response in await asyncio.gather(*guesses)]

    assert serve(scenario, answers=40) == [True] * 8


def test_a_full_service_says_when_to_come_back():
    async def scenario(client):
        game = await start(client)
        full = await client.post("/sessions", json={"seed": 1})
        await client.delete(game)
        await start(client)
        return sentence(full, 503), full.headers["Retry-After"]

    detail, retry_after = serve(scenario, max_sessions=1)
    assert detail.startswith("All 1 places are taken")
    assert int(retry_after) >= 1


def over_time(scenario, **settings):
    """Run `scenario(client)` against a running service; to wait takes no time, and its games age by that."""

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


def test_an_unknown_session_is_told_how_to_start_one():
    async def scenario(client):
        unknown = f"/sessions/{UUID(int=0)}"
        guess = await client.post(f"{unknown}/guess", json={"word": "crane", "turn": 1})
        return sentence(guess, 404), sentence(await client.delete(unknown), 404)

    assert all("POST /sessions starts a new one" in detail for detail in serve(scenario))


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
