"""The cost of a body is bounded: completions, and calls of the dashboard's events."""

import asyncio
import json
import logging

import pytest

from delta_weight_sync.store import open_bucket
from env_space.watch import Replica
from inference_space.gate import BYTES_PER_TOKEN, MAX_BODY, OTHER_BYTES, Completions, DashboardCalls
from space_guard.requests import RateLimit
from tests.inference_space.asking import CONTEXT, client, gate, trainer
from tests.support.dashboard import KEY as OWNERS
from tests.support.dashboard import RecordedControls, mounted

READER = Completions(lambda: CONTEXT, batch=64)
PLAIN = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}


def read(**fields) -> int:
    """How many units a body with these fields takes."""
    return READER.read(json.dumps(PLAIN | fields).encode())[1]


@pytest.mark.finding(4)
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"truncate_prompt_tokens": 8}, "'truncate_prompt_tokens' is not accepted here: leave it out"),
        ({"use_beam_search": True}, "leave it out"),
        ({"chat_template": "{{ 1 }}"}, "leave it out"),
        ({"prompt_logprobs": 20}, "leave it out"),
        ({"vllm_xargs": {}}, "leave it out"),
        ({"stop": ["x"] * 5}, "at most 4 strings"),
        ({"stop": "x" * 1025}, "1024 characters"),
        ({"n": 65}, "at most 64"),
        ({"n": "64"}, "an integer"),
        ({"n": 33, "prompt": ["a", "b"]}, "at most 64"),
        ({"prompt": [[1]] * 65}, "at most 64"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024 entries"),
        ({"stop_token_ids": [1] * 1025}, "at most 1024 entries"),
        ({"chat_template_kwargs": {"times": 10**9}}, "short words only"),
    ],
)
def test_an_expensive_request_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(**fields)


TOOLS = [{"type": "function", "function": {"name": "guess"}}]


@pytest.mark.finding("N7")
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": ".*" * 500 + "x"}},
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
)
def test_only_clients_with_the_key_have_grammars_compiled(fields):
    """vLLM compiles some of them for minutes, even if the client hangs up."""
    assert read(**fields) == 1
    with pytest.raises(ValueError, match="only clients with the key may send structured_outputs"):
        READER.read(json.dumps(PLAIN | fields).encode(), "a visitor")
    open_to_all = Completions(lambda: CONTEXT, batch=64, grammars=False)
    with pytest.raises(ValueError, match="owner sets as REPLICA_KEY"):
        open_to_all.read(json.dumps(PLAIN | fields).encode())


def test_a_visitor_may_describe_tools_that_the_policy_calls_in_its_text():
    READER.read(json.dumps(PLAIN | {"tools": TOOLS, "tool_choice": "none"}).encode(), "a visitor")


@pytest.mark.finding(4)
@pytest.mark.parametrize("body", [b"", b"{", b"[" * 99_999, b"[]", b"1" * 5000, b"\xff"])
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(ValueError, match="the body must be a JSON object"):
        READER.read(body)


@pytest.mark.finding(4)
def test_a_body_is_as_long_as_the_context_allows():
    assert Completions(lambda: 1000, 1).limit == OTHER_BYTES + 1000 * BYTES_PER_TOKEN
    assert Completions(lambda: 10**7, 1).limit == MAX_BODY
    assert Completions(lambda: None, 1).limit == MAX_BODY, "vLLM is about to start, and says so to who asks"
    fullest = json.dumps(PLAIN | {"prompt": [151_935] * CONTEXT}).encode()
    assert len(fullest) <= READER.limit
    assert READER.read(fullest) == (fullest, 1)


@pytest.mark.finding(4)
def test_a_request_counts_once_for_each_completion():
    assert read() == 1
    assert read(n=8) == 8
    assert read(n=8, prompt=["a", "b"]) == 16
    assert read(prompt=[[1, 2], [3]]) == 2
    assert read(n=None, truncate_prompt_tokens=None) == 1


@pytest.mark.finding(4)
def test_requests_of_the_environments_page_pass():
    READER.read(json.dumps(Replica(None, "guess").request()).encode())


@pytest.mark.finding(4)
@pytest.mark.full
def test_all_options_of_openais_client_pass():
    openai = pytest.importorskip("openai", reason="vLLM brings it")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
    common = {"model": "policy", "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "stop": ["a", "b"]}
    common |= {"logit_bias": {"5": 1}, "frequency_penalty": 0.1, "presence_penalty": 0.1, "user": "me"}

    async def scenario() -> None:
        async with trainer(gate()) as http:
            url = "http://replica/v1"
            asked = openai.AsyncOpenAI(api_key="x", base_url=url, http_client=http, max_retries=0)
            await asked.completions.create(prompt="a", max_tokens=9, logprobs=5, echo=True, **common)
            await asked.chat.completions.create(
                messages=[{"role": "user", "content": "hi"}],
                max_completion_tokens=9,
                logprobs=True,
                top_logprobs=5,
                tools=[tool],
                tool_choice="auto",
                parallel_tool_calls=True,
                response_format=schema,
                extra_body={"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
                **common,
            )

    asyncio.run(scenario())


EVENT = "/gradio_api/run/predict"
ODD = [None, True, 0, 1e308, "", "-1", "9" * 1000, "x" * 2000, "\ud800", [], {}, [[]], {"path": "/etc"}]


@pytest.fixture
def dashboard(tmp_path):
    bucket = open_bucket(f"file://{tmp_path}", create=True)
    return mounted(bucket, controls=RecordedControls(), key=OWNERS)


def calls(events: dict[int, int]) -> list[dict]:
    """Of each event and of others, with fitting and odd values."""
    numbers = [*events, 9999, -1, None, "0", 1.5, True, [0]]
    datas = [[], *([odd] for odd in ODD), *(["a", odd] for odd in ODD), *([odd, 1] for odd in ODD), [1] * 9]
    sessions = ["visitor", "", "x" * 15_000, None, "../x", 7]
    wrong = [{"fn_index": n, "data": data, "session_hash": "visitor"} for n in numbers for data in datas]
    wrong += [{"fn_index": 0, "data": [None], "session_hash": session} for session in sessions]
    return [*wrong, {"fn_index": 0, "data": [None], "session_hash": "a", "trigger_id": "x"}, {"data": []}, {}]


@pytest.mark.finding(19)
def test_no_call_of_a_visitor_writes_a_traceback(dashboard, capfd, caplog):
    events = dashboard.state.dashboard_events
    before = gate(whole=dashboard, readers={"event": DashboardCalls(events)}, rate=RateLimit(1e9, 1e9))

    async def ask() -> list[int]:
        async with client(before) as http:
            given = {"headers": {"content-type": "application/json"}}
            answers = [await http.post(EVENT, content=json.dumps(call), **given) for call in calls(events)]
            return [answer.status_code for answer in answers]

    with caplog.at_level(logging.WARNING):
        statuses = asyncio.run(ask())
    assert set(statuses) == {200, 422}
    assert statuses.count(200) >= len(events), "what the page sends is answered"
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


@pytest.mark.finding(19)
def test_each_event_that_the_page_sends_is_known(dashboard):
    inputs = [*dashboard.state.dashboard_events.values()]
    assert (inputs.count(2), inputs.count(1), {*inputs}) == (4, 1, {0, 1, 2}), "four buttons, the live page"
