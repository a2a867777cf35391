"""Calls of the dashboard's events: texts reach Gradio, and nothing else does."""

import asyncio
import json
import logging

import httpx
import pytest
from starlette.applications import Starlette

from delta_weight_sync.store import open_bucket
from inference_space.dashboard.calls import PATH, check_calls
from tests.inference_space.asking import client, echo
from tests.support.dashboard import KEY, RecordedControls, mounted

JSON = {"content-type": "application/json"}
FILE = {"path": "http://169.254.169.254/latest", "meta": {"_type": "gradio.FileData"}}
CALL = {"data": ["a key", "7", None], "fn_index": 3, "session_hash": "abc", "trigger_id": 9}
DATA = [FILE, "1", None], [[FILE], "1", None], ["a key", 1, None], FILE
NO_EVENTS = [*(CALL | {"data": data} for data in DATA), CALL | {"session_hash": FILE}]
NO_EVENTS += [{"fn_index": 0}, [], "data"]


def call(body: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    """The answer to a call where event 3 has three inputs."""

    async def answer(request, _):
        return await echo(request)

    async def ask() -> httpx.Response:
        app = check_calls(Starlette(exception_handlers={404: answer}), events={3: 3})
        async with client(app) as http:
            return await http.post(PATH, content=body, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "body", [*(json.dumps(call).encode() for call in NO_EVENTS), b"{", b"[" * 9000, b"\xff"]
)
def test_an_event_that_would_make_the_server_fetch_a_file_is_refused(body):
    answer = call(body)
    assert (answer.status_code, "reload the page" in answer.text) == (422, True)


def test_an_event_of_plain_values_passes_written_anew():
    doubled = b'{"data": [{"path": "x"}], "oauth_token": "hf_stolen", ' + json.dumps(CALL).encode()[1:]
    assert json.loads(call(doubled).json()["body"]) == CALL


def test_a_call_must_be_declared_as_json_so_that_no_other_site_can_send_it():
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = call(json.dumps(CALL).encode(), {"content-type": kind})
        assert (answer.status_code, "Content-Type: application/json" in answer.text) == (415, True)


def test_a_call_that_is_too_large_is_refused():
    assert call(b" " * (1 << 20)).status_code == 413


ODD = [None, True, 0, 1e308, "", "-1", "9" * 1000, "x" * 2000, "\ud800", [], {}, [[]], {"path": "/etc"}]


def calls(events: range) -> list[dict]:
    """Of each event and of others, with fitting and odd values."""
    numbers = [*events, 9999, -1, None, "0", 1.5, True, [0]]
    datas = [[], *([odd] for odd in ODD), *(["a", odd] for odd in ODD), *([odd, 1] for odd in ODD), [1] * 9]
    sessions = ["visitor", "", "x" * 15_000, None, "../x", 7]
    wrong = [{"fn_index": n, "data": data, "session_hash": "visitor"} for n in numbers for data in datas]
    wrong += [{"fn_index": 0, "data": [None], "session_hash": session} for session in sessions]
    return [*wrong, {"fn_index": 0, "data": [None], "session_hash": "a", "trigger_id": "x"}, {"data": []}, {}]


@pytest.mark.finding(19)
def test_no_call_of_a_visitor_writes_a_traceback(tmp_path, capfd, caplog):
    bucket = open_bucket(f"file://{tmp_path}", create=True)
    dashboard = mounted(bucket, controls=RecordedControls(), key=KEY)

    async def ask() -> list[int]:
        async with client(dashboard) as http:
            sent = [http.post(PATH, content=json.dumps(call), headers=JSON) for call in calls(range(8))]
            return [(await answer).status_code for answer in sent]

    with caplog.at_level(logging.WARNING):
        statuses = asyncio.run(ask())
    assert set(statuses) == {200, 422}
    assert statuses.count(200) >= 5, "what the page sends is answered: four buttons and the live page"
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")
