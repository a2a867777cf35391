"""Finding 5: sixteen requests that never said what they wanted closed the dashboard for a minute."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response

from inference_space.gate import ARRIVING
from inference_space.places import Pace
from tests.security.asking import CONTEXT, OTHER, RIGHT, VISITOR, client, gate, running, trainer

JSON = {"content-type": "application/json"}
COMPLETIONS, EVENT = "/v1/completions", "/gradio_api/run/predict"


async def silent() -> AsyncIterator[bytes]:
    """A body of which nothing more comes."""
    yield b"{"
    await asyncio.Event().wait()


def test_a_body_where_none_belongs_is_not_waited_for():
    async def scenario():
        async with client(gate()) as http:
            for path in ("/", "/v1/models", "/dashboard/bucket"):
                answer = await http.request("GET", path, content=silent())
                assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        return asyncio.get_running_loop().time()

    assert running(scenario) == 0.0, "nobody waited"


@pytest.mark.parametrize(("path", "headers"), [(COMPLETIONS, JSON | RIGHT), (EVENT, JSON)])
def test_a_request_takes_no_place_before_it_has_come_whole(path, headers):
    """There are eight places; sixteen requests are still on their way."""

    async def scenario():
        app = gate()
        async with client(app) as slow, trainer(app) as http:
            waiting = [
                asyncio.create_task(slow.post(path, content=silent(), headers=headers, timeout=None))
                for _ in range(16)
            ]
            await asyncio.sleep(1)
            asked = await http.post(COMPLETIONS, json={"prompt": "a"})
            event = {"data": [None], "fn_index": 0, "session_hash": "a"}
            called = await http.post(EVENT, json=event)
            given_up = [await task for task in waiting]
        return (
            asked.status_code,
            called.status_code,
            {(a.status_code, a.headers["connection"]) for a in given_up},
        )

    assert running(scenario) == (200, 200, {(408, "close")})


def test_one_visitors_unfinished_bodies_do_not_fill_the_memory():
    async def scenario():
        app = gate(open_inference=True, pace=Pace(1e9, 1e9))
        limit = (64 << 10) + 16 * CONTEXT
        most = ARRIVING.at_once // 4 // limit
        async with client(app, VISITOR) as slow, client(app, OTHER) as other, trainer(app) as http:
            asks = [
                asyncio.create_task(slow.post(COMPLETIONS, content=silent(), headers=JSON, timeout=None))
                for _ in range(most)
            ]
            await asyncio.sleep(1)
            refused = await slow.post(COMPLETIONS, content=silent(), headers=JSON, timeout=None)
            others = await other.post(COMPLETIONS, json={}), await http.post(COMPLETIONS, json={})
            for task in asks:
                task.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            return refused.status_code, [answer.status_code for answer in others]

    assert running(scenario) == (429, [200, 200])


def test_views_that_visitors_hold_are_not_those_of_a_trainer():
    """Eight places in the lane: one visitor gets two of them, and a trainer finds one whoever looks."""

    async def scenario():
        go_on = asyncio.Event()

        async def app(_):
            await go_on.wait()
            return Response()

        before = gate(app)
        asks = []
        for number in range(4):
            who = client(before, f"203.0.113.{number}", timeout=None)
            asks += [asyncio.create_task(who.get("/dashboard/bucket")) for _ in range(4)]
        asks += [asyncio.create_task(trainer(before, timeout=None).get("/v1/models"))]
        await asyncio.sleep(1)
        go_on.set()
        return [(await ask).status_code for ask in asks]

    statuses = running(scenario)
    assert [statuses[at : at + 4].count(200) for at in (0, 4, 8, 12)] == [2, 2, 2, 0]
    assert statuses[-1] == 200
