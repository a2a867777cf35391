"""Nothing but the documented routes answers on the public port: every route of vLLM and of Gradio is tried.

vLLM's routes come from its source, Gradio's from the dashboard's app. Each is tried with all methods, with
the key and without. Detours are in test_public_port.py.
"""

import json
import re
import subprocess
import sys

import httpx
import pytest
from starlette.routing import Mount

from delta_weight_sync.store import open_bucket
from tests.live.replica import HEADERS as RIGHT
from tests.live.replica import KEY
from tests.support.dashboard import RecordedControls, mounted

pytestmark = pytest.mark.live

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
CHAT = [{"role": "user", "content": "hi"}]
ASK = {"model": "policy", "prompt": [5, 6, 7], "messages": CHAT, "max_tokens": 1}
# What the README of the Space documents; everything else is 404, or 405 where only the method is another.
VIEWS = ("frame", "inside", "bucket", "delta", "verify", "explain", "object")
LOOKING = ("/", "/health", "/ready", "/status", "/v1/models", "/badge.svg", "/agents.md")
KEYED = ("/v1/completions", "/v1/chat/completions", "/delta_weight_sync/poke")
ASSETS = ("/theme.css", "/favicon.ico", "/assets/x", "/static/x", "/gradio_api/heartbeat/x")
LOGIN = ("/login/huggingface", "/login/callback", "/logout")
DOCUMENTED = {
    ("HEAD", "/"),
    *(("GET", path) for path in (*LOOKING, *ASSETS, *LOGIN)),
    *(("GET", f"/dashboard/{view}") for view in VIEWS),
    *(("POST", path) for path in (*KEYED, "/gradio_api/run/predict")),
}


@pytest.fixture(scope="module")
def vllm_paths() -> set[str]:
    options = ["--enable-fault-tolerance", "--enable-scale-out"]
    command = [sys.executable, "-m", "tests.live.vllm_routes", *options]
    source = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return set(json.loads(source.splitlines()[-1]))


@pytest.fixture(scope="module")
def gradio_paths(tmp_path_factory) -> set[str]:
    """Of a dashboard with its owner's tab."""
    bucket = open_bucket(tmp_path_factory.mktemp("empty").as_uri(), create=True)
    app = mounted(bucket, controls=RecordedControls(), key=KEY)
    (gradio,) = (route for route in app.routes if isinstance(route, Mount))
    return {route.path for route in [*gradio.app.routes, *app.routes]}


def answers(url: str, paths: set[str]) -> dict[tuple[str, str, bool], int]:
    """(method, path, with the key?) -> status, for all methods; "x" is the value of each parameter."""
    seen = {}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for path in sorted({re.sub(r"{[^}]*}", "x", path) or "/" for path in paths}):
            for method in METHODS:
                body = {"json": ASK} if method in ("POST", "PUT", "PATCH") else {}
                for key in (False, True):
                    headers = RIGHT if key else {}
                    with client.stream(method, path, headers=headers, **body) as answer:  # some have no end
                        seen[method, path, key] = answer.status_code
    return seen


@pytest.mark.parametrize("source", ["vllm_paths", "gradio_paths"])
def test_of_all_routes_only_the_documented_ones_answer(replica, source, request):
    paths = request.getfixturevalue(source)
    assert len(paths) > 50, "the source was found"
    seen = answers(replica.url, paths)
    undocumented = {asked: status for asked, status in seen.items() if asked[:2] not in DOCUMENTED}
    assert {asked: status for asked, status in undocumented.items() if status not in (404, 405)} == {}
    elsewhere = {path for _, path in DOCUMENTED}
    assert {path for (_, path, _), status in undocumented.items() if status == 405} <= elsewhere
    closed = {asked[:2] for asked, status in seen.items() if status == 401}
    assert closed <= {("POST", path) for path in KEYED}


@pytest.mark.parametrize(
    ("method", "path", "without", "status"),
    [
        *(("GET", path, 200, 200) for path in (*LOOKING, "/theme.css", "/dashboard/bucket")),
        ("HEAD", "/", 200, 200),
        *(("POST", path, 401, 200) for path in KEYED),
        ("GET", "/dashboard/object?key=runs/live/run.json", 200, 200),
        ("GET", "/dashboard/object?key=../../etc/passwd", 404, 404),
        ("GET", "/login/huggingface", 404, 404),
        ("GET", "/logout", 302, 302),
        ("POST", "/gradio_api/run/predict", 422, 422),
    ],
)
def test_documented_routes_answer_as_documented(replica, method, path, without, status):
    body = {"json": ASK} if method == "POST" and not path.endswith("/poke") else {}
    assert httpx.request(method, f"{replica.url}{path}", **body).status_code == without
    assert httpx.request(method, f"{replica.url}{path}", headers=RIGHT, **body).status_code == status
