"""A visitor's invalid call of an event writes no traceback into the log."""

import asyncio
import json
import logging

import pytest
import uvicorn

from delta_weight_sync.store import open_bucket
from inference_space import public_port
from inference_space.gate import DashboardCalls
from space_guard.limits import LogLimit
from tests.inference_space.asking import client, gate
from tests.support.dashboard import KEY as OWNERS
from tests.support.dashboard import RecordedControls, mounted

pytestmark = pytest.mark.finding(19)

EVENT = "/gradio_api/run/predict"
ODD = [None, True, -1, 0, 1e308, -1e308, 1 << 60, "", "x" * 1000, "x" * 2000, "\ud800", [], {}, [[]]]
ODD.append({"path": "/etc"})
INFINITE = b'{"data": [null, Infinity], "fn_index": %d, "session_hash": "a"}'


@pytest.fixture
def dashboard(tmp_path):
    bucket = open_bucket(f"file://{tmp_path}", create=True)
    return mounted(bucket, controls=RecordedControls(), key=OWNERS)


def calls(events: dict[int, list[str]]) -> list[dict]:
    """Of each event and of others, with fitting and odd values."""
    numbers = [*events, 9999, -1, None, "0", 1.5, True, [0]]
    datas = [[], *([odd] for odd in ODD), *(["a", odd] for odd in ODD), *([odd, 1] for odd in ODD), [1] * 9]
    sessions = ["visitor", "", "x" * 15_000, None, "../x", 7]
    wrong = [
        {"fn_index": number, "data": data, "session_hash": "visitor"} for number in numbers for data in datas
    ]
    wrong += [{"fn_index": 0, "data": [None], "session_hash": session} for session in sessions]
    return [*wrong, {"fn_index": 0, "data": [None], "session_hash": "a", "trigger_id": "x"}, {"data": []}, {}]


def test_no_call_of_a_visitor_writes_a_traceback(dashboard, capfd, caplog):
    events = dashboard.state.dashboard_events
    before = gate(readers={"event": DashboardCalls(events)}, key="some-key-of-this-replica")
    before._app = dashboard
    before._rate.spend = lambda *_: None

    async def ask() -> list[int]:
        async with client(before) as http:
            given = {"headers": {"content-type": "application/json"}}
            answers = [await http.post(EVENT, content=json.dumps(call), **given) for call in calls(events)]
            answers += [await http.post(EVENT, content=INFINITE % number, **given) for number in events]
            return [answer.status_code for answer in answers]

    with caplog.at_level(logging.WARNING):
        statuses = asyncio.run(ask())
    assert set(statuses) == {200, 422}
    assert statuses.count(200) >= len(events), "what the page sends is answered"
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_each_event_that_the_page_sends_is_known(dashboard):
    kinds = sorted(map(tuple, dashboard.state.dashboard_events.values()))
    assert kinds.count(("text", "number")) == 4, "the owner's four buttons"
    assert kinds.count(("kept",)) == 1, "the live page"
    assert {*kinds} == {(), ("kept",), ("text", "number")}


def test_the_servers_log_is_limited_and_has_no_line_for_requests_that_are_not_http(monkeypatch):
    given, server = {}, logging.getLogger("uvicorn.error")
    monkeypatch.setattr(server, "filters", [])
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: given.update(options))
    public_port.listen(None, "127.0.0.1", 1)
    assert [type(found) for found in server.filters] == [LogLimit]
    assert (given["access_log"], given["log_level"]) == (False, "error")
