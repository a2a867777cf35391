"""The gate of the public port: what passes, what is refused with which sentence, what is kept here."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from inference_space.completions import Completions
from inference_space.dashboard_calls import Calls
from inference_space.gate import Gate, find
from inference_space.places import Lane
from inference_space.refused import Refused
from tests import idle_time

KEY = "correct-horse-battery-staple"
JSON = {"content-type": "application/json"}
COMPLETIONS = "/v1/completions"
CONTEXT = 1000  # tokens
LONGEST = (64 << 10) + 16 * CONTEXT  # bytes
EVENTS = {0: ["kept"], 3: ["text", "number", "kept"]}
LANES = {name: Lane(2, 600.0) for name in ("inference", "reading")}


async def echo(request: Request) -> Response:
    """What an app behind the gate gets to see."""
    headers = {name.decode(): value.decode() for name, value in request.headers.raw}
    return JSONResponse({"body": (await request.body()).decode(), "headers": headers})


def behind(app: Callable[[Request], Awaitable[Response]], **options) -> Gate:
    async def answer(request: Request, _: Exception) -> Response:
        return await app(request)

    everything = Starlette(exception_handlers={404: answer})
    readers = {"completion": Completions(lambda: CONTEXT, at_once=8), "event": Calls(EVENTS)}
    return Gate(everything, **{"key": KEY, "lanes": LANES, "readers": readers, **options})


def asking(gate: Gate, scenario):
    """Run `scenario(client)` against the gate."""

    async def run():
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await scenario(client)

    return idle_time.run(run())


def ask(method: str, path: str, *, app=echo, key: str = KEY, **content) -> httpx.Response:
    return asking(behind(app, key=key), lambda client: client.request(method, path, **content))


def sentence(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/ready",
        "/status?after=3",
        "/v1/models",
        "/dashboard/object?key=runs/demo/run.json",
        "/assets/index-BQ1_x.js",
        "/theme.css",
    ],
)
def test_looking_needs_no_key(path):
    assert ask("GET", path).status_code == 200


UNLISTED = [
    "/openapi.json",
    "/docs",
    "/metrics",
    "/pause",
    "/v1",
    "/v1/models/",
    "//v1/models",
    "/v1/../health",
    "/./health",
    "/v1/%6dodels",
    "/%68ealth",
    "/health%00",
    "/health;x",
    "/health%0a",
    "/health\n",
    "http://replica/health",
    "*",
    "",
    "/assets/../config",
    "/assets/.env",
    "/assets/a%2f..%2fconfig",
    "/assets/a//b",
    "/assets",
    "/assets/\xe9.js",
    "/gradio_api/upload",
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/run/other",
]


@pytest.mark.parametrize("path", UNLISTED)
def test_what_is_not_listed_does_not_exist(path):
    with pytest.raises(Refused, match="no such route") as refused:
        find({"raw_path": path.encode("latin-1"), "method": "GET"})
    assert refused.value.answer.status_code == 404


def test_a_listed_route_takes_its_methods_only():
    answer = ask("GET", COMPLETIONS, headers={"X-Space-Key": KEY})
    assert "takes POST only" in sentence(answer, 405)
    assert answer.headers["allow"] == "POST"
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        overriding = {"X-HTTP-Method-Override": "GET", "X-Method-Override": "GET"}
        assert ask(method, "/health", headers=overriding).status_code == 405


def test_inference_needs_the_key_and_says_which_of_both_is_wrong():
    missing = sentence(ask("POST", COMPLETIONS, json={}), 401)
    wrong = sentence(ask("POST", COMPLETIONS, json={}, headers={"X-Space-Key": KEY[:-1]}), 401)
    assert "send its REPLICA_KEY in the header X-Space-Key" in missing
    assert "compare it with its REPLICA_KEY" in wrong
    assert KEY[:-1] not in wrong
    for path in (COMPLETIONS, "/v1/chat/completions"):
        assert ask("POST", path, json={"n": 1}, headers={"X-Space-Key": KEY}).json()["body"] == '{"n":1}'


def test_a_poke_wants_the_key_and_carries_nothing():
    poke, right = "/delta_weight_sync/poke", {"X-Space-Key": KEY}
    assert ask("POST", poke).status_code == 401
    assert ask("POST", poke, headers=right).status_code == 200
    assert ask("POST", poke, headers=right, content=b"x").status_code == 413
    assert ask("GET", poke, headers=right).status_code == 405


def test_a_key_elsewhere_than_in_its_header_opens_nothing():
    for elsewhere in ({"Authorization": f"Bearer {KEY}"}, {"Cookie": f"X-Space-Key={KEY}"}):
        assert ask("POST", f"{COMPLETIONS}?key={KEY}", json={}, headers=elsewhere).status_code == 401


def test_without_a_key_inference_is_open():
    assert ask("POST", COMPLETIONS, key="", json={}).status_code == 200


def test_no_app_behind_gets_to_see_key_or_token_or_answers_other_sites():
    given = {
        "X-Space-Key": KEY,
        "Authorization": "Bearer hf_x",
        "Origin": "https://evil.example",
        "Cookie": "a=b",
    }
    seen = ask("POST", COMPLETIONS, json={}, headers=given).json()["headers"]
    assert seen.keys() == {"host", "accept", "accept-encoding", "user-agent", "cookie", "content-type"}
    assert (seen["host"], seen["cookie"]) == ("replica", "a=b")


def test_a_body_that_is_too_large_is_refused_however_it_comes():
    async def in_parts() -> AsyncIterator[bytes]:
        for _ in range(LONGEST // 1000 + 1):
            yield b" " * 1000

    for body in (b" " * (LONGEST + 1), in_parts()):
        answer = ask("POST", COMPLETIONS, content=body, headers=JSON | {"X-Space-Key": KEY})
        assert f"at most {LONGEST} bytes" in sentence(answer, 413)
    assert ask("GET", "/health", content=b"x").status_code == 413


def test_a_body_must_be_declared_as_json():
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = ask("POST", COMPLETIONS, content=b"{}", headers={"content-type": kind, "X-Space-Key": KEY})
        assert "Content-Type: application/json" in sentence(answer, 415)


def test_more_at_once_than_there_are_places_is_told_to_come_back():
    async def scenario():
        started, go_on = asyncio.Semaphore(0), asyncio.Event()

        async def app(request: Request) -> Response:
            if request.url.path == COMPLETIONS:
                started.release()
                await go_on.wait()
            return Response()

        transport = httpx.ASGITransport(behind(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            send = functools.partial(client.post, COMPLETIONS, json={}, headers={"X-Space-Key": KEY})
            first = [asyncio.create_task(send()) for _ in range(2)]
            for _ in first:
                await started.acquire()
            refused, looking = await send(), await client.get("/v1/models")
            go_on.set()
            later = [*await asyncio.gather(*first), await send()]
            return refused, looking.status_code, [answer.status_code for answer in later]

    refused, looking, later = asyncio.run(scenario())
    assert "try again in a moment" in sentence(refused, 429)
    assert refused.headers["retry-after"] == "1"
    assert (looking, later) == (200, [200, 200, 200])


def test_an_answer_that_takes_too_long_is_given_up_and_its_place_is_free_again():
    async def forever(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def scenario(client):
        return [await client.post(COMPLETIONS, json={}, headers={"X-Space-Key": KEY}) for _ in range(3)]

    for answer in asking(behind(forever, lanes={"inference": Lane(1, 600.0)}), scenario):
        assert "longer than this Space allows" in sentence(answer, 504)


def test_a_stream_that_takes_too_long_is_cut_off():
    ended, sent, received = [], [], iter([{"type": "http.request", "body": b"{}"}])

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"data: first\n\n"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def stream(request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/event-stream")

    async def receive():
        return next(received, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    path = COMPLETIONS.encode()
    headers = [(b"x-space-key", KEY.encode()), (b"content-type", b"application/json")]
    headers += [(b"content-length", b"2")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": path, "headers": headers}
    idle_time.run(
        behind(stream, lanes={"inference": Lane(1, 600.0)})({**scope, "query_string": b""}, receive, send)
    )
    assert [message.get("body") for message in sent] == [None, b"data: first\n\n"], "and no end of it"
    assert ended == [True]


def test_a_body_that_does_not_come_is_not_waited_for():
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = ask("POST", COMPLETIONS, content=never(), headers=JSON | {"X-Space-Key": KEY})
    assert "did not come within 60 s" in sentence(answer, 408)


def test_a_time_out_of_the_app_itself_is_not_taken_for_ours():
    async def failing(request: Request) -> Response:
        raise TimeoutError("the app's own")

    with pytest.raises(TimeoutError, match="the app's own"):
        ask("POST", COMPLETIONS, app=failing, json={}, headers={"X-Space-Key": KEY})


@pytest.mark.parametrize("path", ["/", COMPLETIONS, "/gradio_api/queue/join"])
def test_no_socket_is_opened(path):
    with (
        TestClient(behind(echo)) as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(path),
    ):
        pass


FILE = {"path": "http://169.254.169.254/latest", "meta": {"_type": "gradio.FileData"}}
CALL = {"data": ["a key", 7, None], "fn_index": 3, "session_hash": "abc", "trigger_id": 9}


@pytest.mark.parametrize(
    "call",
    [
        CALL | {"data": [FILE, 1, None]},
        CALL | {"data": [[FILE], 1, None]},
        CALL | {"session_hash": FILE},
        CALL | {"data": FILE},
        {"fn_index": 0},
        [],
        "data",
    ],
)
def test_an_event_that_would_make_the_server_fetch_a_file_is_refused(call):
    answer = ask("POST", "/gradio_api/run/predict", json=call)
    assert "an event of the dashboard" in sentence(answer, 422)


@pytest.mark.parametrize("body", [b"{", b"[" * 9000, b"\xff"])
def test_an_event_that_is_no_json_is_refused(body):
    answer = ask("POST", "/gradio_api/run/predict", content=body, headers=JSON)
    assert "JSON object" in sentence(answer, 422)


def test_an_event_of_plain_values_passes_written_anew():
    doubled = b'{"data": [{"path": "x"}], "oauth_token": "hf_stolen", ' + json.dumps(CALL).encode()[1:]
    answer = ask("POST", "/gradio_api/run/predict", content=doubled, headers=JSON)
    assert json.loads(answer.json()["body"]) == CALL
