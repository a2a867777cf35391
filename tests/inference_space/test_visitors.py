"""One visitor cannot keep the event loop busy that answers the trainer."""

import asyncio

import pytest

from inference_space.gate import RATE
from space_guard.requests import RateLimit
from tests.inference_space.asking import OTHER, VISITOR, client, gate, running, trainer

pytestmark = pytest.mark.finding(7)


def test_a_visitors_rate_limit_leaves_others_alone():
    async def scenario():
        app = gate(rate=RateLimit(*RATE, clock=asyncio.get_running_loop().time))
        async with client(app, VISITOR) as flood, client(app, OTHER) as other, trainer(app) as keyed:
            answers = [(await flood.get("/")).status_code for _ in range(2000)]
            others = [(await who.get("/")).status_code for who in (other, keyed)]
            keyed_too = {(await keyed.get("/v1/models")).status_code for _ in range(1000)}
            await asyncio.sleep(1)
            later = [(await flood.get("/")).status_code for _ in range(200)]
        return answers, others, keyed_too, later

    answers, others, keyed, later = running(scenario)
    per_second, burst = RATE
    assert answers == sorted(answers), "and none after the first refusal"
    assert answers.count(200) == pytest.approx(burst / 2, abs=1)
    assert (others, keyed) == ([200, 200], {200})
    assert later.count(200) == pytest.approx(per_second / 2, abs=1)


def test_old_visitors_are_forgotten():
    rate = RateLimit(1.0, 1.0, clock=lambda: 0.0)
    for number in range(5000):
        rate.spend(f"visitor {number}", 1.0)
    assert rate.spend("visitor 0", 1.0) == 0.0
    assert rate.spend("visitor 4999", 1.0) == 1.0, "seconds until it can pay"
