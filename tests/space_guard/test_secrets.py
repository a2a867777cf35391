"""No log has a secret, at any level and of any library, whatever a client sends, whichever store is used."""

import base64
import json
import logging
import re
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from delta_weight_sync.errors import BucketError
from delta_weight_sync.signing import SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from env_space import app as env_app
from env_space.settings import Settings as EnvSettings
from inference_space import public_port
from inference_space.settings import Settings
from tests.support.fake_vllm import InMemoryVllm
from tests.support.http_server import answering
from tests.support.published_run import write_run
from tests.support.serving import serving
from tests.support.waiting import PATIENCE_S, soon
from trainer.demo.processes import free_port

KEY = "planted-key-of-a-space"
OTHER_KEY = "planted-key-of-a-replica"
TOKEN = "hf_plantedtoken"
ACCESS = "planted-access-secret"
PAIR = new_pair()
SECRETS = (KEY, OTHER_KEY, TOKEN, ACCESS, PAIR[SIGNING_KEY])
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def logged(caplog, capfd):
    """Everything that was logged or printed so far, with each logger at its lowest level."""
    names = list(logging.root.manager.loggerDict)
    levels = {name: logging.getLogger(name).level for name in names}

    def listen() -> None:
        for name in [*logging.root.manager.loggerDict]:
            levels.setdefault(name, logging.NOTSET)
            logging.getLogger(name).setLevel(1)

    caplog.set_level(1)
    listen()
    yield listen, lambda: "\n".join([caplog.text, *capfd.readouterr()])
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def assert_none_in(text: str) -> None:
    assert len(text) > 1000, "the logs were read"
    for secret in SECRETS:
        for form in (secret, base64.b64encode(secret.encode()).decode()):
            assert [line for line in text.splitlines() if form in line] == []


def upgrade(url: str, *headers: str) -> bytes:
    """The answer to a WebSocket's handshake; a client's library would log its own headers."""
    host, port = url.removeprefix("http://").split(":")
    lines = [f"GET /ws HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket", *headers]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "\r\n"]
    with socket.create_connection((host, int(port)), PATIENCE_S) as link:
        link.sendall("\r\n".join(lines).encode())
        return link.recv(1 << 16)


def test_the_environment_logs_none(logged, monkeypatch):
    listen, text = logged
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with answering(lambda _: (500, {}, b"no")) as replica:
        settings = EnvSettings(key=KEY, replica_url=replica, replica_key=OTHER_KEY)
        with serving(env_app.create_app(settings), **env_app.server_options()) as url:
            listen()
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                for headers in ({"X-Space-Key": KEY}, {"X-Space-Key": KEY + "x"}, BEARER):
                    http.post("/sessions", json={"seed": 1}, headers=headers)
                    http.post("/sessions", content=b"{", headers=headers)
                assert "problem" in http.get("/watch").text
            assert b" 101 " in upgrade(url, f"X-Space-Key: {KEY}", f"Authorization: Bearer {TOKEN}")
            assert b" 101 " not in upgrade(url, f"X-Space-Key: {KEY}x")
    assert_none_in(text())


class InMemory(InMemoryVllm):
    """A vLLM for the replica's app; it fails at every request."""

    context = 100

    def __init__(self, _: Settings) -> None:
        super().__init__()
        self.app = Starlette(exception_handlers={404: self.fail})

    async def fail(self, request, _):
        return JSONResponse({"headers": dict(request.headers)})

    def attach(self, loop) -> None: ...


def test_the_replica_logs_none(logged, monkeypatch, tmp_path):
    listen, text = logged
    monkeypatch.setattr(public_port, "VllmServer", InMemory)
    for name, value in (*PAIR.items(), ("HF_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    bucket = (tmp_path / "bucket").as_uri()
    write_run(bucket, tmp_path / "base", 2)
    monkeypatch.delenv(SIGNING_KEY)
    settings = Settings(
        bucket=bucket, run="test", key=KEY, folder=str(tmp_path / "replica"), host="127.0.0.1"
    )
    with serving(lambda: public_port.create_app(settings), factory=True, log_config=None) as url:
        listen()
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            soon(lambda: http.get("/ready").is_success)
            for headers in ({"X-Space-Key": KEY}, {"X-Space-Key": KEY + "x"}, BEARER):
                for body in (b"{", b'{"prompt":"x"}', json.dumps({"user": KEY}).encode()):
                    answer = http.post("/v1/completions", content=body, headers=headers)
                    assert KEY not in answer.text
                http.post("/delta_weight_sync/poke", headers=headers)
            config = re.search(
                r"window\.gradio_config = ({.*?});</script>",
                http.get("/").text.replace("location.origin", "null"),
            )
            for event in json.loads(config[1])["dependencies"]:
                data = [KEY, KEY][: len(event["inputs"])]
                http.post(
                    "/gradio_api/run/predict",
                    json={"fn_index": event["id"], "session_hash": "a", "data": data},
                )
            for path in (
                "/status",
                "/dashboard/bucket",
                f"/dashboard/object?key={KEY[:5]}",
                "/login/huggingface",
            ):
                assert KEY not in http.get(path, headers=BEARER).text
    assert_none_in(text())


def test_the_stores_log_none(logged, monkeypatch, hub_env):
    listen, text = logged
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ACCESS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    for url in ("hf://buckets/team/wordle", "s3://bucket/prefix"):
        listen()
        with pytest.raises(BucketError) as refused:
            open_bucket(url).list("runs/")
        logging.getLogger("x").error("%s", refused.value, exc_info=refused.value)
    assert_none_in(text())
