"""The cost of a completion request is bounded: choices, prompts, stop strings, and clients that hang up."""

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.responses import Response

from env_space.watch import Replica
from inference_space.gate import BYTES_PER_TOKEN, MAX_BODY, OTHER_BYTES, Completions
from tests.inference_space.asking import CONTEXT, RIGHT, ask_raw, gate, running, trainer

pytestmark = pytest.mark.finding(4)

READER = Completions(lambda: CONTEXT, batch=64)
PLAIN = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}


def read(**fields) -> int:
    """How many units a body with these fields takes."""
    return READER.read(json.dumps(PLAIN | fields).encode())[1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"structured_outputs": {"choice": ["a"] * 129}}, "at most 128"),
        ({"structured_outputs": {"grammar": "x" * (16 << 10)}}, "structured_outputs is too large"),
        ({"response_format": {"json_schema": {"x": "y" * (16 << 10)}}}, "response_format is too large"),
        ({"tools": [{"function": {"name": "x" * (16 << 10)}}]}, "tools is too large"),
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


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 99_999, b"[]", b"1" * 5000, b"\xff"])
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(ValueError, match="the body must be a JSON object"):
        READER.read(body)


def test_a_body_is_as_long_as_the_context_allows():
    assert Completions(lambda: 1000, 1).limit == OTHER_BYTES + 1000 * BYTES_PER_TOKEN
    assert Completions(lambda: 10**7, 1).limit == MAX_BODY
    assert Completions(lambda: None, 1).limit == MAX_BODY, "vLLM is about to start, and says so to who asks"
    fullest = json.dumps(PLAIN | {"prompt": [151_935] * CONTEXT}).encode()
    assert len(fullest) <= READER.limit
    assert READER.read(fullest) == (fullest, 1)


def test_a_request_counts_once_for_each_completion():
    assert read() == 1
    assert read(n=8) == 8
    assert read(n=8, prompt=["a", "b"]) == 16
    assert read(prompt=[[1, 2], [3]]) == 2
    assert read(n=None, truncate_prompt_tokens=None) == 1


def test_requests_of_the_environments_page_pass():
    READER.read(json.dumps(Replica(None, "guess").request()).encode())


@pytest.mark.full
def test_all_options_of_openais_client_pass():
    openai = pytest.importorskip("openai", reason="vLLM brings it")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
    common = {"model": "policy", "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "stop": ["a", "b"]}
    common |= {"logit_bias": {"5": 1}, "frequency_penalty": 0.1, "presence_penalty": 0.1, "user": "me"}

    async def scenario() -> None:
        async with trainer(gate()) as http:
            asked = openai.AsyncOpenAI(
                api_key="x", base_url="http://replica/v1", http_client=http, max_retries=0
            )
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


@pytest.mark.live
def test_requests_of_trls_worker_pass():
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    sent = []

    class Loop(_AsyncRolloutLoop):
        def __init__(self) -> None:
            self.max_tokens, self.request_timeout = 9, 9
            self.temperature = self.top_p = self.repetition_penalty = 1.0
            self.top_k, self.min_p, self.model_name = 0, 0.1, "policy"
            self._request_model_name = "policy"

        _request_model = "policy"

        async def _retry(self, ask, **_):
            return await ask()

        async def _post(self, path, payload, *_):
            sent.append(json.dumps(payload).encode())
            return {"choices": [{"token_ids": [], "logprobs": {"token_logprobs": []}}]}

    asyncio.run(Loop()._generate_one_turn([1, 2, 3]))
    assert READER.read(*sent)[1] == 1


def test_an_app_hears_that_its_client_has_gone():
    """vLLM ends a generation as soon as it hears of it."""

    async def until_gone(request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response("gone")

    body = {"type": "http.request", "body": b'{"n": 1}'}
    headers = RIGHT | {"content-type": "application/json", "content-length": "8"}
    *_, last = running(
        lambda: ask_raw(
            gate(until_gone), "/v1/completions", body, {"type": "http.disconnect"}, headers=headers
        )
    )
    assert last["body"] == b"gone"
