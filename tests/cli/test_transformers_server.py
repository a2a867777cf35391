"""The server without vLLM, over HTTP: whose turn it is, what made an answer, and what is refused."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
BODY = {"model": "policy", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
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


@contextmanager
def started() -> Iterator[Serving]:
    serving = Serving()
    follower = SimpleNamespace(serving=SimpleNamespace(sync=1), commands=None)
    with on_loopback(create_app(follower, serving.engine)) as serving.url:
        try:
            yield serving
        finally:
            serving.gate.set()


@pytest.fixture
def serving() -> Iterator[Serving]:
    with started() as serving:
        yield serving


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    """One for tests that do not close its gate."""
    with started() as serving:
        yield serving


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


def test_another_config_or_tokenizer_of_the_same_shapes_is_loaded_anew(tmp_path):
    """Such as another rotary base, which no tensor holds."""
    engine = TransformersEngine()
    engine.start(POLICY)
    version = Path(shutil.copytree(POLICY, tmp_path / "version"))
    assert engine.serves(version)
    config = json.loads((version / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 50
    (version / "config.json").write_text(json.dumps(config))
    assert not engine.serves(version)
    engine.start(version)
    assert engine.serves(version)
    assert engine.model().config.rope_parameters == config["rope_parameters"]


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


def text(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def test_equal_seeds_give_equal_answers_behind_other_requests_too(serving):
    sampled = {"max_tokens": 40, "temperature": 1}
    pairs = [[text(serving.post(**sampled, **seed)) for seed in ({"seed": 7}, {})] for _ in range(2)]
    assert pairs[0][0] == pairs[1][0]
    assert pairs[0][1] != pairs[1][1], "a seed is that of one answer"
    serving.gate.clear()
    serving.steps.clear()
    first = serving.later(serving.post, temperature=1)
    serving.wait_for(waiting=0)
    behind = [serving.later(serving.post, **sampled, seed=seed) for seed in (7, 8)]
    serving.wait_for(waiting=2)
    serving.gate.set()
    found = [text(answer.result()) for answer in behind]
    assert found[0] == pairs[0][0]
    assert found[1] != found[0], "it samples"
    assert first.result().is_success


CHAT: dict[str, Any] = {"prompt": None, "messages": [{"role": "user", "content": "Hello"}]}
CANNOT = "this server cannot do {}: leave it out, or install vLLM"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        *(
            ({name: value, **path}, CANNOT.format(name))
            for path in ({}, CHAT)
            for name, value in {
                "logit_bias": {"5": 3},
                "frequency_penalty": 0.5,
                "presence_penalty": -1,
                "n": 2,
                "best_of": 2,
                "echo": True,
                "suffix": "end",
                "stop": ["a"],
                "logprobs": 0,
                "top_logprobs": 2,
                "response_format": {"type": "json_object"},
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "reasoning_effort": "low",
                "generation_config": '{"num_beams": 2}',
                "top_k": 5,
            }.items()
        ),
        *(
            ({name: value, **path}, f"{name} must be {what}")
            for path in ({}, CHAT)
            for name, value, what in (
                ("model", "other", '"policy"'),
                ("stream", "yes", "true or false"),
                ("max_tokens", 0, "a whole number, at least 1"),
                ("max_completion_tokens", 2.5, "a whole number, at least 1"),
                ("temperature", -1, "a number, at least 0"),
                ("temperature", "1", "a number, at least 0"),
                ("top_p", 7, "a number above 0, at most 1"),
                ("top_p", 0, "a number above 0, at most 1"),
                ("seed", 1 << 64, "a whole number of 64 bits"),
            )
        ),
        *(({"prompt": prompt}, "prompt must be one string, not empty") for prompt in ([1, 2], None, "")),
        *(
            (CHAT | {"messages": messages}, "messages must be a list of objects with role and content")
            for messages in (
                "Hello",
                [],
                ["Hello"],
                [{"content": "no role"}],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
                [{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}],
                [{"role": "user", "content": "a", "name": "me"}],
                [{"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}],
            )
        ),
        (CHAT | {"tools": [{"type": "function"}]}, "the model's chat template does not know tools"),
    ],
)
def test_what_it_would_not_compute_as_asked_is_refused_by_name(fields, sentence, shared):
    answer = shared.post(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["detail"].startswith(sentence)


def test_fields_that_change_no_answer_are_welcome(shared):
    neutral = {"n": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": False, "user": "me"}
    neutral |= {"logit_bias": {}, "stop": []}
    completion = shared.post(**neutral, echo=False, best_of=1)
    assert text(completion) == text(shared.post())
    neutral |= {"store": False, "parallel_tool_calls": True, "modalities": ["text"]}
    said = {"refusal": None, "tool_calls": [], "content": [{"type": "text", "text": "Hello"}]}
    more = {"messages": [{"role": "user", **said}], "response_format": {"type": "text"}, "tools": []}
    answers = [shared.post(**CHAT), shared.post(**CHAT | neutral | more)]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
