"""A fresh service, in this process or as a Space runs it, the form of its refusals, and a fake replica."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from starlette.testclient import TestClient
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import env_space
from env_space.app import create_app
from env_space.settings import Settings
from space_guard.limits import PROXIES
from trainer.demo.processes import free_port

ROOT = Path(env_space.__file__).parent.parent
BRIDE = 1020  # the seed whose secret is "bride" among all words
PATIENCE_S = 60
COMMAND = [sys.executable, "-m", "env_space.app"]


def service(**settings):
    """A client of a fresh service in this process, behind a proxy as uvicorn has it."""
    app = ProxyHeadersMiddleware(create_app(Settings(**settings)), PROXIES)
    return TestClient(app, client=("127.0.0.1", 1))


def seen_from(number):
    """The header by which the Hub's proxy says that visitor `number` asks."""
    return {"X-Forwarded-For": f"198.51.100.{number}"}


def start(client, seed=BRIDE):
    response = client.post("/sessions", json={"seed": seed})
    assert response.status_code == 201
    return f"/sessions/{response.json()['session']}"


def guess(client, game, word, turn):
    return client.post(f"{game}/guess", json={"word": word, "turn": turn})


def sentence(response, status):
    """The `detail` of a refusal, which must be a sentence."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"detail"}
    assert response.json()["detail"].endswith(".")
    return response.json()["detail"]


@contextmanager
def answering(answer):
    """The URL of a server that calls `answer(handler)` for each request."""

    class Handler(BaseHTTPRequestHandler):
        do_GET = do_POST = answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Space:
    """`python -m env_space.app` in a process on loopback; its log is complete after it has stopped."""

    def __init__(self, log, files=None, **variables):
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environ = os.environ | {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(port)} | variables
        limited = ["prlimit", f"--nofile={files}"] if files else []
        with log.open("wb") as file:
            self.process = subprocess.Popen([*limited, *COMMAND], cwd=ROOT, env=environ, stderr=file)

    def wait(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self._log.read_text()
            try:
                return httpx.get(f"{self.url}/health", trust_env=False, timeout=PATIENCE_S)
            except httpx.ConnectError:
                time.sleep(0.02)
        raise AssertionError(f"the service did not answer in {PATIENCE_S} s")

    def says(self, words):
        """Wait until its log has these words."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self._log.read_text():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def stop(self):
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        return self._log.read_text()


@contextmanager
def space(folder, files=None, **variables):
    """A running Space that must stop properly in the end; it may open at most `files` files."""
    running = Space(folder / "space.log", files, **variables)
    try:
        running.wait()
        yield running
    finally:
        log = running.stop()
    assert "Finished server process" in log
    assert "Traceback" not in log
