"""The gate of the public port: what passes, what is refused with which sentence, and how much of it."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from inference_space.gate import ARRIVING, LEAST, find_route
from space_guard.limits import Lane
from space_guard.requests import RateLimit
from tests.inference_space.asking import KEY, OTHER, RIGHT, ask_raw, client, echo, gate, running, trainer

JSON = {"content-type": "application/json"}
COMPLETIONS, EVENT = "/v1/completions", "/gradio_api/run/predict"
LONGEST = (64 << 10) + 16 * 1000  # bytes; the context has 1000 tokens
ONE = {"inference": Lane(1, 600.0)}  # one request at a time


def behind(app=echo, **options):
    lanes = {name: Lane(2, 600.0) for name in ("inference", "reading")}
    return gate(app, **{"lanes": lanes, **options})


def ask(method: str, path: str, *, app=echo, key: str = KEY, **content) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client(behind(app, key=key)) as http:
            return await http.request(method, path, **content)

    return running(scenario)


def sentence(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_looking_needs_no_key():
    paths = ["/", "/health", "/ready", "/status?after=3", "/v1/models", "/theme.css"]
    for path in (*paths, "/dashboard/object?key=x", "/assets/index-BQ1_x.js"):
        assert ask("GET", path).status_code == 200


_PATHS = (
    "/openapi.json /docs /metrics /pause /v1 /v1/models/ //v1/models * /v1/../health /./health /v1/%6dodels"
    " /%68ealth /health%00 /health;x /health%0a /assets/../config /assets/.env"
    " /assets/a//b /assets /assets/a%2f..%2fconfig /assets/\xe9.js /gradio_api/upload /gradio_api/run/other"
    " /gradio_api/file=/etc/passwd //pause /v1//models /v1/../pause /v1/%2e%2e/pause /v1/%2E%2E%2Fpause"
    " /%70ause /pause/ /pause?x=/health /health/ /health;/pause /health%2f..%2fpause /\\pause /V1/models"
    " /assets/../pause /assets/%2e%2e/%2e%2e/etc/passwd /static/..%2f..%2f..%2fetc/passwd"
    " /gradio_api/proxy=http://127.0.0.1:1/ /gradio_api/run/predict/ /gradio_api/heartbeat/../upload"
)
DETOURS = _PATHS.split()


@pytest.mark.parametrize("path", [*DETOURS, "http://replica/health", "", "/health\n"])
def test_what_is_not_listed_does_not_exist(path):
    with pytest.raises(HTTPException, match="no such route") as refused:
        find_route({"raw_path": path.encode("latin-1"), "method": "GET"})
    assert refused.value.status_code == 404


def test_a_listed_route_takes_its_methods_only():
    answer = ask("GET", COMPLETIONS, headers=RIGHT)
    assert "takes POST only" in sentence(answer, 405)
    assert answer.headers["allow"] == "POST"
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        overriding = {"X-HTTP-Method-Override": "GET", "X-Method-Override": "GET"}
        assert ask(method, "/health", headers=overriding).status_code == 405


def test_inference_needs_the_key_and_says_which_of_both_is_wrong():
    missing = sentence(ask("POST", COMPLETIONS, json={}), 401)
    wrong = sentence(ask("POST", COMPLETIONS, json={}, headers={"X-Space-Key": KEY[:-1]}), 401)
    assert "send the Space's REPLICA_KEY in the header X-Space-Key" in missing
    assert "this Space's REPLICA_KEY" in wrong
    assert KEY[:-1] not in wrong
    for path in (COMPLETIONS, "/v1/chat/completions"):
        assert ask("POST", path, json={"n": 1}, headers=RIGHT).json()["body"] == '{"n":1}'


def test_a_poke_wants_the_key_and_carries_nothing():
    poke, right = "/delta_weight_sync/poke", RIGHT
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
    given = RIGHT | {"Authorization": "Bearer hf_x", "Origin": "https://evil.example", "Cookie": "a=b"}
    seen = ask("POST", COMPLETIONS, json={}, headers=given).json()["headers"]
    assert seen.keys() == {"host", "accept", "accept-encoding", "user-agent", "cookie", "content-type"}
    assert (seen["host"], seen["cookie"]) == ("replica", "a=b")


def test_a_body_that_is_too_large_is_refused_however_it_comes():
    async def in_parts() -> AsyncIterator[bytes]:
        for _ in range(LONGEST // 1000 + 1):
            yield b" " * 1000

    for body in (b" " * (LONGEST + 1), in_parts()):
        answer = ask("POST", COMPLETIONS, content=body, headers=JSON | RIGHT)
        assert f"at most {LONGEST} bytes" in sentence(answer, 413)
    assert ask("GET", "/health", content=b"x").status_code == 413


def test_a_body_must_be_declared_as_json():
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = ask("POST", COMPLETIONS, content=b"{}", headers={"content-type": kind, "X-Space-Key": KEY})
        assert "Content-Type: application/json" in sentence(answer, 415)


def test_more_requests_than_the_lane_has_room_for_are_asked_to_come_back():
    async def scenario():
        started, go_on = asyncio.Semaphore(0), asyncio.Event()

        async def app(request: Request) -> Response:
            if request.url.path == COMPLETIONS:
                started.release()
                await go_on.wait()
            return Response()

        async with trainer(behind(app)) as http:
            first = [asyncio.create_task(http.post(COMPLETIONS, json={})) for _ in range(2)]
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
        async with trainer(behind(lambda _: asyncio.Event().wait(), lanes=ONE)) as http:
            return [await http.post(COMPLETIONS, json={}) for _ in range(3)]

    for answer in running(scenario):
        assert "longer than this Space allows" in sentence(answer, 504)


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

    before, body = behind(stream, lanes=ONE), {"type": "http.request", "body": b"{}"}
    headers = RIGHT | JSON | {"content-length": "2"}
    sent = running(lambda: ask_raw(before, COMPLETIONS, body, headers=headers))
    assert [message.get("body") for message in sent] == [None, b"data: first\n\n"], "and no end of it"
    assert ended == [True]


def test_a_time_out_of_the_app_itself_is_not_taken_for_ours():
    async def failing(request: Request) -> Response:
        raise TimeoutError("the app's own")

    with pytest.raises(TimeoutError, match="the app's own"):
        ask("POST", COMPLETIONS, app=failing, json={}, headers=RIGHT)


FILE = {"path": "http://169.254.169.254/latest", "meta": {"_type": "gradio.FileData"}}
CALL = {"data": ["a key", "7", None], "fn_index": 3, "session_hash": "abc", "trigger_id": 9}
DATA = [FILE, "1", None], [[FILE], "1", None], ["a key", 1, None], FILE
NO_EVENTS = [*(CALL | {"data": data} for data in DATA), CALL | {"session_hash": FILE}]
NO_EVENTS += [{"fn_index": 0}, [], "data"]


@pytest.mark.parametrize(
    "body", [*(json.dumps(call).encode() for call in NO_EVENTS), b"{", b"[" * 9000, b"\xff"]
)
def test_an_event_that_would_make_the_server_fetch_a_file_is_refused(body):
    answer = ask("POST", EVENT, content=body, headers=JSON)
    assert "reload the page" in sentence(answer, 422)


def test_an_event_of_plain_values_passes_written_anew():
    doubled = b'{"data": [{"path": "x"}], "oauth_token": "hf_stolen", ' + json.dumps(CALL).encode()[1:]
    answer = ask("POST", EVENT, content=doubled, headers=JSON)
    assert json.loads(answer.json()["body"]) == CALL


async def silent() -> AsyncIterator[bytes]:
    """A body of which nothing more comes."""
    yield b"{"
    await asyncio.Event().wait()


@pytest.mark.finding(5)
def test_a_body_where_none_belongs_is_not_waited_for():
    async def scenario():
        async with client(gate()) as http:
            for path in ("/", "/v1/models", "/dashboard/bucket"):
                answer = await http.request("GET", path, content=silent())
                assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        return asyncio.get_running_loop().time()

    assert running(scenario) == 0.0, "nobody waited"


@pytest.mark.finding(5)
@pytest.mark.parametrize(("path", "headers"), [(COMPLETIONS, JSON | RIGHT), (EVENT, JSON)])
def test_a_request_takes_no_place_before_all_of_it_has_arrived(path, headers):
    """There are eight places; sixteen requests are still on their way."""

    async def scenario():
        app = gate()
        async with client(app) as slow, trainer(app) as http:
            requests = (slow.post(path, content=silent(), headers=headers, timeout=None) for _ in range(16))
            waiting = [*map(asyncio.create_task, requests)]
            await asyncio.sleep(1)
            asked = await http.post(COMPLETIONS, json={"prompt": "a"})
            event = {"data": [None], "fn_index": 0, "session_hash": "a"}
            called = await http.post(EVENT, json=event)
            given_up = [await task for task in waiting]
        late = {(answer.status_code, answer.headers["connection"]) for answer in given_up}
        return asked.status_code, called.status_code, late

    assert running(scenario) == (200, 200, {(408, "close")})


@pytest.mark.finding(5)
@pytest.mark.finding("N3")
@pytest.mark.parametrize("said", [JSON, JSON | {"content-length": "1"}], ids=["chunked", "short"])
def test_one_visitors_unfinished_bodies_take_little_memory_and_few_connections(said):
    async def scenario():
        app = gate(open_inference=True, rate=RateLimit(1e9, 1e9))
        most = ARRIVING // 4 // LEAST
        async with client(app) as slow, client(app, OTHER) as other, trainer(app) as http:
            options = {"headers": said, "timeout": None}
            requests = (slow.post(COMPLETIONS, content=silent(), **options) for _ in range(most))
            asks = [*map(asyncio.create_task, requests)]
            await asyncio.sleep(1)
            refused = await slow.post(COMPLETIONS, content=silent(), **options)
            others = await other.post(COMPLETIONS, json={}), await http.post(COMPLETIONS, json={})
            for task in asks:
                task.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            return refused.status_code, [answer.status_code for answer in others]

    assert running(scenario) == (429, [200, 200])


@pytest.mark.finding(16)
@pytest.mark.parametrize(
    "host", ["x/server_info?", "x/collective_rpc#", "evil.example", "[::1", "a b", "x/v1/completions?"]
)
def test_a_host_leads_to_no_other_route(host):
    async def scenario():
        async with client(gate()) as http:
            looked = await http.get("/v1/models", headers={"Host": host})
            asked = await http.post("/v1/completions", json={}, headers={"Host": host} | RIGHT)
            keyless = await http.post("/v1/completions", json={}, headers={"Host": host})
            hidden = await http.get("/server_info", headers={"Host": host} | RIGHT)
        return looked.json(), asked.json(), keyless.status_code, hidden.status_code

    looked, asked, keyless, hidden = running(scenario)
    assert (looked["path"], asked["path"]) == ("/v1/models", "/v1/completions")
    assert looked["headers"]["host"] == asked["headers"]["host"] == "replica", "no app gets to see another"
    assert (keyless, hidden) == (401, 404)
