"""Finding 7: each visitor's page was made anew, in the loop that answers the trainer."""

import asyncio
import importlib
import re

import httpx
import pytest
from fastapi import FastAPI

from delta_weight_sync.store import open_bucket
from inference_space.gate import PACE
from inference_space.places import Pace
from inference_space.refused import Refused
from tests.security.asking import OTHER, VISITOR, client, gate, running, trainer

mounted = importlib.import_module("inference_space.dashboard.mount")  # its name is the function's, too


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The dashboard's app, and the views of which a page was made."""
    views, paint = [], mounted.paint
    monkeypatch.setattr(mounted, "paint", lambda view, **more: views.append(view) or paint(view, **more))

    async def app() -> FastAPI:  # outside of a loop Gradio makes its own and leaves them open
        return mounted.mount(FastAPI(), open_bucket(f"file://{tmp_path}", create=True), None)

    return asyncio.run(app()), views


def asked(app: FastAPI, times: int, **options) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with client(app) as http:
            return await asyncio.gather(*(http.get("/", **options) for _ in range(times)))

    return asyncio.run(ask())


def test_a_page_is_made_once_for_all_who_look_at_it(made):
    app, views = made
    pages = [page for name in ("replica", "evil.example") for page in asked(app, 40, headers={"Host": name})]
    assert len({page.content for page in pages}) <= len(views)
    assert len(views) == len({view.revision for view in views}), "a page for a view, not for a visitor"
    assert len(views) < 10
    assert "evil.example" not in pages[-1].text


def test_a_page_finds_its_server_by_itself(made):
    page = asked(made[0], 1)[0].text
    assert re.search(r'"root":\s*location\.origin', page)
    assert ".invalid" not in page


def test_one_visitor_may_ask_so_often_and_others_are_not_slowed_by_it():
    async def scenario():
        app = gate(pace=Pace(*PACE, clock=asyncio.get_running_loop().time))
        async with client(app, VISITOR) as flood, client(app, OTHER) as other, trainer(app) as keyed:
            answers = [(await flood.get("/")).status_code for _ in range(2000)]
            others = [(await who.get("/")).status_code for who in (other, keyed)]
            keyed_too = {(await keyed.get("/v1/models")).status_code for _ in range(1000)}
            await asyncio.sleep(1)
            later = [(await flood.get("/")).status_code for _ in range(200)]
        return answers, others, keyed_too, later

    answers, others, keyed, later = running(scenario)
    per_second, burst = PACE
    assert answers == sorted(answers), "and none after the first refusal"
    assert answers.count(200) == pytest.approx(burst / 2, abs=1)
    assert (others, keyed) == ([200, 200], {200})
    assert later.count(200) == pytest.approx(per_second / 2, abs=1)


def test_who_asked_once_is_not_remembered_for_ever():
    pace = Pace(1.0, 1.0, clock=lambda: 0.0)
    for number in range(5000):
        pace.spend(f"visitor {number}", 1.0)
    pace.spend("visitor 0", 1.0)
    with pytest.raises(Refused):
        pace.spend("visitor 4999", 1.0)
