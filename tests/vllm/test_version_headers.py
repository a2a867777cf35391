"""Versions in the headers of answers, and refusals of requests that need other weights."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of torch that are deprecated
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.inputs import tokens_input
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from delta_weight_sync.vllm import _version_headers

pytestmark = pytest.mark.live  # vLLM's own classes

LIVE = SimpleNamespace(version=7, writer_term=1, sync=7)
WEIGHTS = [{"version": sync, "term": 1, "sync": sync} for sync in range(9)]
LABELS = [json.dumps(weights) for weights in WEIGHTS]
CHUNK = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENT = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """In place of vLLM's engine: each request makes one choice, of tokens of the given versions."""

    async def generate(
        _: Any, syncs: list[int], params: Any, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        spans = [WeightVersionSpan(LABELS[sync], at, at + 1) for at, sync in enumerate(syncs)]
        likely = [{1: Logprob(-1.0), 2: Logprob(-2.0)}]
        choice = CompletionOutput(0, "", [0] * len(syncs), None, likely, finish_reason="stop")
        choice.weight_versions = spans
        yield RequestOutput(request_id, None, [], None, [choice], finished=True)

    monkeypatch.setattr(AsyncLLM, "generate", AsyncLLM.generate)
    monkeypatch.setattr(_version_headers, "_plain", generate)


async def made(*syncs: int, request_id: str = "cmpl-a-0") -> None:
    async for _ in AsyncLLM.generate(None, [*syncs], None, request_id):
        pass


def asked(
    route: Callable[[Request], Awaitable[Response]],
    path: str = "/v1/completions",
    root: str = "",
    **headers: str,
) -> httpx.Response:
    """The answer of a vLLM whose routes are all `route`."""
    app = FastAPI(root_path=root)
    app.add_api_route("/{path:path}", route, methods=["POST"])
    app.add_middleware(_version_headers.version_headers, serving=lambda: LIVE)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm", headers=named) as client:
            return await client.post(path)

    return asyncio.run(ask())


def stream(*syncs: int, chunks: tuple[bytes, ...]) -> Callable[[Request], Awaitable[Response]]:
    async def parts() -> AsyncIterator[bytes]:
        await made(*syncs)
        for chunk in chunks:
            yield chunk

    async def route(request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/event-stream")

    return route


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/cohere/v2/chat"]
)
def test_a_stream_that_could_not_say_that_its_weights_changed_is_refused_and_ended(path):
    events = []

    async def parts() -> AsyncIterator[bytes]:
        while len(events) < 1000:
            events.append(EVENT)
            yield EVENT
            await asyncio.sleep(0)

    async def route(request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/event-stream")

    refused = asked(route, path, x_policy_exact_sync="7")
    assert refused.status_code == 501
    assert "x-policy-exact-sync holds for no stream of this route" in refused.json()["error"]["message"]
    assert len(events) < 1000, "vLLM does not generate for nobody"
    plain = asked(stream(7, 8, chunks=(EVENT,)), path)
    assert (plain.status_code, plain.content) == (200, EVENT)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_a_stream_of_chunks_says_whether_its_weights_changed(path, root):
    answers = [
        asked(stream(*syncs, chunks=(CHUNK, DONE)), root + path, root, x_policy_exact_sync="7")
        for syncs in ([7, 7], [7, 8])
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["x-policy-versions"] == json.dumps(
            [{"weights": WEIGHTS[7]}], separators=(",", ":")
        )
    same, changed = (json.loads(answer.text.split("\n\n")[0].removeprefix("data: ")) for answer in answers)
    assert same["policy_versions"] == [{"weights": WEIGHTS[7], "tokens": [[0, 0, 1], [0, 1, 2]]}]
    assert "weights changed while it answered" in changed["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/cohere/v2/chat", "/invocations"])
def test_a_whole_answer_of_any_route_has_the_weights_that_were_asked_for(path):
    async def changing(request: Request) -> Response:
        await made(7, 8)
        return JSONResponse({})

    for sync, status in (("6", 409), ("7", 503), ("8", 503)):
        assert asked(changing, path, x_policy_exact_sync=sync).status_code == status
    assert asked(changing, path, x_policy_min_sync="8").status_code == 503
    assert asked(changing, path, x_policy_min_sync="7").status_code == 200


def test_a_beam_search_says_which_weights_took_part_and_not_of_which_tokens():
    """vLLM asks its engine for the next token of each beam; the beams that it drops are in no choice."""
    engine = mock.Mock()
    engine.generate = lambda prompt, params, request_id, **_: AsyncLLM.generate(
        None, [6 + len(prompt["prompt_token_ids"])], params, request_id
    )
    server = BeamSearchOnlineMixin()
    server.engine_client = engine
    server.renderer = mock.Mock(**{"get_tokenizer.return_value.eos_token_id": 9})

    async def search(request: Request) -> Response:
        params = BeamSearchParams(beam_width=2, max_tokens=2)
        async for output in server.beam_search(tokens_input([1]), "cmpl-a", params):
            assert len(output.outputs) == 2
        return JSONResponse({})

    both = [{"weights": WEIGHTS[7]}, {"weights": WEIGHTS[8]}]
    assert json.loads(asked(search).headers["x-policy-versions"]) == both
    assert asked(search, x_policy_exact_sync="7").status_code == 503


def test_an_answer_made_in_turns_says_which_weights_took_part_and_not_of_which_tokens():
    """As `/v1/responses` with vLLM's tools. One turn, or one request for each choice, has its tokens."""

    async def turns(request: Request) -> Response:
        await made(7, 7, request_id="resp_a_0")
        await made(7, 8, request_id="resp_a_1")
        return JSONResponse({})

    async def turn(request: Request) -> Response:
        await made(7, 8, request_id="resp_a_0")
        return JSONResponse({})

    def versions(*of: Any) -> Any:
        return json.loads(asked(*of).headers["x-policy-versions"])

    assert versions(turns, "/v1/responses") == [{"weights": WEIGHTS[7]}, {"weights": WEIGHTS[8]}]
    assert [entry["tokens"] for entry in versions(turn, "/v1/responses")] == [[[0, 0, 1]], [[0, 1, 2]]]
    both = [[[0, 0, 1], [0, 1, 2], [1, 0, 1]], [[1, 1, 2]]]
    assert [entry["tokens"] for entry in versions(turns, "/v1/completions")] == both
