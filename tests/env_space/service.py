"""A fresh service, in this process or as a Space runs it, and the form of its refusals."""

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from starlette.testclient import TestClient

import env_space
from env_space.app import create_app
from env_space.settings import Settings
from tests.support.waiting import PATIENCE_S, soon
from trainer.demo.processes import free_port

ROOT = Path(env_space.__file__).parent.parent
BRIDE = 1020  # the seed whose secret is "bride" among all words


def service(**settings):
    """A client of a fresh service in this process."""
    return TestClient(create_app(Settings(**settings)))


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


class Space:
    """`python -m APP.app` in a process on loopback; its log is complete after it has stopped."""

    def __init__(self, log, files=None, app="env_space", **variables):
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        prefix = {"env_space": "WORDLE", "inference_space": "REPLICA"}[app]
        environ = os.environ | {f"{prefix}_HOST": "127.0.0.1", f"{prefix}_PORT": str(port)} | variables
        limited = ["prlimit", f"--nofile={files}"] if files else []
        command = [*limited, sys.executable, "-m", f"{app}.app"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file)

    def wait(self):
        def answers():
            assert self.process.poll() is None, self._log.read_text()
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health", trust_env=False, timeout=PATIENCE_S)

        soon(answers, self._log.read_text)

    def says(self, words):
        """Wait until its log has these words."""
        soon(lambda: words in self._log.read_text(), self._log.read_text)

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
