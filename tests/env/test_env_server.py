"""`python -m env_space.app` as a Space runs it: one real process behind a real socket."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

import env_space

COMMAND = [sys.executable, "-m", "env_space.app"]
ROOT = Path(env_space.__file__).parent.parent


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def service(**variables):
    port = free_port()
    environ = os.environ | {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(port)} | variables
    process = subprocess.Popen(COMMAND, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_for(client, process)
            yield client
    finally:
        process.terminate()
        _, log = process.communicate(timeout=10)
    assert "Finished server process" in log


def wait_for(client, process):
    for _ in range(200):
        assert process.poll() is None, process.communicate()[1]
        try:
            return client.get("/health")
        except httpx.ConnectError:
            time.sleep(0.05)
    raise AssertionError("the service did not answer in 10 s")


def test_a_game_over_a_real_socket():
    with service(WORDLE_ANSWERS="1") as client:
        [secret] = client.get("/words").json()["answers"]
        session = client.post("/sessions", json={"seed": 5}).json()["session"]
        move = client.post(f"/sessions/{session}/guess", json={"word": secret, "turn": 1}).json()
        assert (move["solved"], move["reward_parts"]["solved"]) == (True, 1.25)


def test_a_wrong_setting_stops_the_start_with_a_sentence():
    environ = os.environ | {"WORDLE_ANSWERS": "1000000"}
    stopped = subprocess.run(COMMAND, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)
    assert stopped.returncode == 1
    assert stopped.stderr.startswith("The Wordle Space cannot start. There are ")
    assert "Traceback" not in stopped.stderr
