"""The server without vLLM, over HTTP: whose turn it is, what made an answer, and what is refused."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from delta_weight_sync.transformers_server import TransformersEngine, create_app
from tests.support.serving import serving as on_loopback
from tests.support.waiting import soon

pytestmark = pytest.mark.full
POLICY = Path(__file__).parents[2] / "trainer" / "policies" / "wordle-tiny"
BODY = {"model": "policy", "prompt": "Hello", "max_tokens": 8}
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


def label(version: int) -> str:
    return json.dumps({"version": version, "term": 1, "sync": version}, separators=(",", ":"))


class Serving:
    """The server on loopback.

    Attributes:
        url: Where it is.
        gate: Each step of the model waits for it. It is open at first.
        steps: The label of the weights at each step, also at one that waits for the gate.
    """

    url: str

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.steps: list[str] = []
        self.engine = TransformersEngine()
        self.engine.start(POLICY)
        self.engine.set_label(label(1))
        self.engine.model().register_forward_pre_hook(self._step, prepend=True)
        self._callers = ThreadPoolExecutor()

    def _step(self, *_: object) -> None:
        self.steps.append(self.engine.label)
        assert self.gate.wait(240)

    def post(self, **fields: Any) -> httpx.Response:
        body = {name: value for name, value in (BODY | fields).items() if value is not None}
        path = PATHS["messages" if "messages" in body else "prompt"]
        return httpx.post(f"{self.url}{path}", json=body, timeout=240)

    def later(self, call: Any, *arguments: Any, **fields: Any) -> "Future[Any]":
        return self._callers.submit(call, *arguments, **fields)

    def ask(self, **fields: Any) -> HTTPConnection:
        """Send a request; closing what this returns leaves."""
        connection = HTTPConnection(httpx.URL(self.url).netloc.decode(), timeout=240)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", PATHS["prompt"], json.dumps(BODY | fields), headers)
        return connection

    def wait_for(self, waiting: int) -> None:
        """Block until an answer is at a step, and `waiting` requests wait for their turn."""
        found = self.engine.thread.waiting
        soon(lambda: self.steps and len(found) == waiting, lambda: f"{len(found)} wait")


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    follower = SimpleNamespace(serving=SimpleNamespace(sync=1), commands=None)
    with on_loopback(create_app(follower, serving.engine)) as serving.url:
        yield serving
        serving.gate.set()


def test_a_commit_goes_before_requests_that_wait_and_those_of_clients_that_left_are_skipped(serving):
    serving.gate.clear()
    first = serving.later(serving.post)
    serving.wait_for(waiting=0)
    leaving = [serving.ask(stream=stream) for stream in (False, True)]
    serving.wait_for(waiting=2)
    second = serving.later(serving.post)
    serving.wait_for(waiting=3)
    for client in leaving:
        client.close()
    serving.wait_for(waiting=1)
    commit = serving.later(serving.engine.relabel, label(2))
    soon(lambda: serving.engine.thread._commits)
    serving.gate.set()
    commit.result()
    for answer, version in ((first, 1), (second, 2)):
        (made,) = json.loads(answer.result().headers["x-policy-versions"])
        assert made == {"weights": json.loads(label(version)), "tokens": [[0, 0, 8]]}
    assert serving.steps == [label(1)] * 8 + [label(2)] * 8


def test_a_stream_names_the_version_that_makes_it_not_the_one_at_its_arrival(serving):
    serving.gate.clear()
    first = serving.later(serving.post)
    serving.wait_for(waiting=0)
    stream = serving.later(serving.post, stream=True)
    serving.wait_for(waiting=1)
    commit = serving.later(serving.engine.relabel, label(2))
    soon(lambda: serving.engine.thread._commits)
    serving.gate.set()
    commit.result()
    assert stream.result().headers["x-policy-versions"] == f'[{{"weights":{label(2)}}}]'
    assert serving.steps == [label(1)] * 8 + [label(2)] * 8
    assert first.result().is_success


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_stops_when_its_client_leaves(serving, stream):
    serving.gate.clear()
    client = serving.ask(stream=stream, max_tokens=200)
    serving.wait_for(waiting=0)
    client.close()
    second = serving.later(serving.post)
    serving.wait_for(waiting=1)
    serving.gate.set()
    assert second.result().json()["usage"]["completion_tokens"] == 8
    assert len(serving.steps) < 20


def test_one_request_too_many_is_refused_until_others_leave(serving):
    serving.gate.clear()
    clients = [serving.ask()]
    serving.wait_for(waiting=0)
    clients += [serving.ask() for _ in range(32)]
    serving.wait_for(waiting=32)
    refused = serving.post()
    assert refused.status_code == 429
    assert refused.json()["detail"] == "32 requests wait here already: try again later"
    assert refused.headers["retry-after"] == "1"
    for client in clients:
        client.close()
    serving.wait_for(waiting=0)
    last = serving.later(serving.post)
    serving.wait_for(waiting=1)
    serving.gate.set()
    assert last.result().status_code == 200
