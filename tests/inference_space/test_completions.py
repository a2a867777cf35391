"""What a request for completions may cost: the fields and size of its body, its completions, its time."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from env_space.watch import Replica
from inference_space.completions import BYTES_PER_TOKEN, MAX_BODY, OTHER_BYTES, Completions
from tests.inference_space.asking import CONTEXT, RIGHT, ask_raw, guarded, running, trainer

COMPLETIONS = "/v1/completions"
READER = Completions(lambda: CONTEXT, batch=64)
PLAIN = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}


def count(**fields) -> int:
    return READER.count(json.dumps(PLAIN | fields).encode())


@pytest.mark.finding(4)
@pytest.mark.finding("M3")
@pytest.mark.finding("M4")
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
        ({"messages": [{}] * 100}, "each with a role"),
        ({"messages": {"role": "user"}}, "a list of objects"),
        ({"messages": [{"role": "user", "content": [1] * 100}]}, "parts of type text"),
        ({"messages": [{"role": "user", "content": 5}]}, "parts of type text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "parts of type text",
        ),
        ({"messages": [{"role": "user", "content": "a"}] * 1025}, "at most 1024 messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}] * 600}] * 2}, "1024 parts"),
        ({"messages": [{"role": "user", "tool_calls": [{}] * 4096}]}, "4096 values"),
        ({"messages": [{"role": "user"} | {str(key): 1 for key in range(4096)}]}, "4096 values"),
        ({"prompt": [[1], "a"]}, "prompt must be a text"),
        ({"prompt": [1, True]}, "prompt must be a text"),
        ({"prompt": [-1] * 9}, "prompt must be a text"),
        ({"echo": True, "logprobs": 0, "prompt": "🫨" * 257}, "at most 1024 tokens"),
        ({"prompt": [{}] * 9}, "prompt must be a text"),
        ({"prompt": [[[1]]]}, "prompt must be a text"),
        ({"echo": True, "logprobs": 0, "prompt": [1] * 1025}, "at most 1024 tokens"),
        ({"echo": True, "logprobs": 1, "prompt": ["a", "a" * 1024]}, "at most 1024 tokens"),
    ],
)
def test_an_expensive_request_is_refused(fields, sentence):
    with pytest.raises(HTTPException, match=sentence) as refused:
        count(**fields)
    assert refused.value.status_code == 422


@pytest.mark.finding(4)
@pytest.mark.parametrize("body", [b"", b"{", b"[" * 80_000, b"[]", b"1" * 5000, b"\xff"])
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(HTTPException, match="the body must be a JSON object"):
        READER.count(body)


@pytest.mark.finding(4)
def test_a_body_is_as_long_as_the_context_allows():
    assert Completions(lambda: 1000, 1).limit == OTHER_BYTES + 1000 * BYTES_PER_TOKEN
    assert Completions(lambda: 10**7, 1).limit == MAX_BODY
    assert Completions(lambda: None, 1).limit == MAX_BODY, "vLLM is about to start, and says so to who asks"
    fullest = json.dumps(PLAIN | {"prompt": [151_935] * CONTEXT}).encode()
    assert len(fullest) <= READER.limit
    assert READER.count(fullest) == 1
    with pytest.raises(HTTPException, match=f"at most {READER.limit} bytes") as refused:
        READER.count(b" " * (READER.limit + 1))
    assert refused.value.status_code == 413


@pytest.mark.finding(4)
def test_a_request_counts_once_for_each_completion():
    assert count() == 1
    assert count(n=8) == 8
    assert count(n=8, prompt=["a", "b"]) == 16
    assert count(prompt=[[1, 2], [3]]) == 2
    assert count(n=None, truncate_prompt_tokens=None) == 1


@pytest.mark.finding(4)
def test_requests_of_the_environments_page_pass():
    READER.count(json.dumps(Replica(None, "guess").request()).encode())


@pytest.mark.finding(4)
@pytest.mark.full
def test_all_options_of_openais_client_pass():
    openai = pytest.importorskip("openai", reason="vLLM brings it")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
    common = {"model": "policy", "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "stop": ["a", "b"]}
    common |= {"logit_bias": {"5": 1}, "frequency_penalty": 0.1, "presence_penalty": 0.1, "user": "me"}

    async def scenario() -> None:
        async with trainer(guarded()) as http:
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


def sentence(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_more_completions_than_there_is_room_for_are_asked_to_come_back():
    async def scenario():
        started = asyncio.Semaphore(0)
        go_on = asyncio.Event()

        async def app(request: Request) -> Response:
            if request.url.path == COMPLETIONS:
                started.release()
                await go_on.wait()
            return Response()

        async with trainer(guarded(app, capacity=4)) as http:
            first = [asyncio.create_task(http.post(COMPLETIONS, json={"n": 2})) for _ in range(2)]
            for _ in first:
                await started.acquire()
            refused, looking = await http.post(COMPLETIONS, json={}), await http.get("/v1/models")
            go_on.set()
            return refused, [looking, *await asyncio.gather(*first), await http.post(COMPLETIONS, json={})]

    refused, others = running(scenario)
    assert "try again in a moment" in sentence(refused, 429)
    assert refused.headers["retry-after"] == "1"
    assert [answer.status_code for answer in others] == [200] * 4


def test_an_answer_that_takes_too_long_is_given_up_and_its_place_is_free_again():
    async def scenario():
        async with trainer(guarded(lambda _: asyncio.Event().wait(), capacity=1)) as http:
            return [await http.post(COMPLETIONS, json={}) for _ in range(3)]

    for answer in running(scenario):
        assert "longer than this Space allows" in sentence(answer, 504)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM imports parts of torch that are deprecated
def test_vllm_stops_when_time_is_up_and_only_then_the_place_is_free():
    """vLLM runs a route's handler as a task of its own, which lives on if only its caller is cancelled."""
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    happened = []

    @with_cancellation
    async def generate(body: dict, raw_request: Request) -> None:
        happened.append("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            happened.append("stopped")

    async def route(request: Request) -> Response:
        return JSONResponse(await generate({}, request))  # as FastAPI does, also after the client has left

    async def scenario():
        async with trainer(guarded(route, capacity=1)) as http:
            return [await http.post(COMPLETIONS, json={}) for _ in range(2)]

    for answer in running(scenario):
        assert "longer than this Space allows" in sentence(answer, 504)
    assert happened == ["begun", "stopped"] * 2


def test_a_stream_that_takes_too_long_is_cut_off():
    ended = []

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"data: first\n\n"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def stream(request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/event-stream")

    before = guarded(stream)
    body = {"type": "http.request", "body": b"{}"}
    sent = running(lambda: ask_raw(before, COMPLETIONS, body, headers=RIGHT))
    assert [message.get("body") for message in sent] == [None, b"data: first\n\n"], "and no end of it"
    assert ended == [True]


def test_a_time_out_of_the_app_itself_is_not_taken_for_ours():
    async def failing(request: Request) -> Response:
        raise TimeoutError("the app's own")

    async def scenario():
        async with trainer(guarded(failing)) as http:
            await http.post(COMPLETIONS, json={})

    with pytest.raises(TimeoutError, match="the app's own"):
        running(scenario)


@pytest.mark.finding(5)
def test_a_request_takes_no_place_before_all_of_it_has_arrived():
    async def scenario():
        async def silent() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        async with trainer(guarded(capacity=1)) as http:
            requests = (http.post(COMPLETIONS, content=silent(), timeout=None) for _ in range(16))
            waiting = [*map(asyncio.create_task, requests)]
            await asyncio.sleep(1)
            asked = await http.post(COMPLETIONS, json={"prompt": "a"})
            given_up = await asyncio.gather(*waiting)
        late = {(answer.status_code, answer.headers["connection"]) for answer in given_up}
        return asked.status_code, late

    assert running(scenario) == (200, {(408, "close")})
