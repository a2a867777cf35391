"""The public port of a replica: which routes pass, with which key and body, and what apps behind it see."""

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.exceptions import HTTPException

from inference_space.public_port import ROUTES
from space_guard.guard import find_route
from tests.inference_space.asking import KEY, RIGHT, client, guarded, running

COMPLETIONS = "/v1/completions"
LONGEST = (64 << 10) + 16 * 1000  # bytes; the context has 1000 tokens


def ask(method: str, path: str, *, key: str = KEY, **content) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client(guarded(key=key)) as http:
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
        find_route(ROUTES, {"raw_path": path.encode("latin-1"), "method": "GET"})
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
    poke = "/delta_weight_sync/poke"
    right = RIGHT
    assert ask("POST", poke).status_code == 401
    assert ask("POST", poke, headers=right).status_code == 200
    assert ask("POST", poke, headers=right, content=b"x").status_code == 413
    assert ask("GET", poke, headers=right).status_code == 405


def test_a_key_elsewhere_than_in_its_header_opens_nothing():
    for elsewhere in ({"Authorization": f"Bearer {KEY}"}, {"Cookie": f"X-Space-Key={KEY}"}):
        assert ask("POST", f"{COMPLETIONS}?key={KEY}", json={}, headers=elsewhere).status_code == 401


def test_where_no_key_is_set_a_client_on_this_machine_needs_none():
    """`tests/inference_space/test_setup.py` shows that only a replica on loopback starts without a key."""
    assert ask("POST", COMPLETIONS, key="", json={}).status_code == 200


@pytest.mark.finding("M2")
def test_an_upgrade_is_refused_before_any_app_sees_it():
    upgrade = {"Connection": "Upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Version": "13"}
    for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", COMPLETIONS)):
        assert "no WebSocket" in sentence(ask(method, path, headers=upgrade | RIGHT), 400)


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
        answer = ask("POST", COMPLETIONS, content=body, headers=RIGHT)
        assert f"at most {LONGEST} bytes" in sentence(answer, 413)
    assert ask("GET", "/health", content=b"x").status_code == 413


@pytest.mark.finding(16)
@pytest.mark.parametrize(
    "host", ["x/server_info?", "x/collective_rpc#", "evil.example", "[::1", "a b", "x/v1/completions?"]
)
def test_a_host_leads_to_no_other_route(host):
    async def scenario():
        async with client(guarded()) as http:
            looked = await http.get("/v1/models", headers={"Host": host})
            asked = await http.post("/v1/completions", json={}, headers={"Host": host} | RIGHT)
            keyless = await http.post("/v1/completions", json={}, headers={"Host": host})
            hidden = await http.get("/server_info", headers={"Host": host} | RIGHT)
        return looked.json(), asked.json(), keyless.status_code, hidden.status_code

    looked, asked, keyless, hidden = running(scenario)
    assert (looked["path"], asked["path"]) == ("/v1/models", "/v1/completions")
    assert looked["headers"]["host"] == asked["headers"]["host"] == "replica", "no app gets to see another"
    assert (keyless, hidden) == (401, 404)
