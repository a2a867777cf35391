"""Every process ends when it is asked to, whatever its threads do, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.env_space.service import PATIENCE_S, ROOT
from trainer.demo.processes import free_port

pytestmark = [pytest.mark.full, pytest.mark.finding("N8")]

URL = "hf://buckets/me/silent"
S3 = "s3://silent"
SPACE = {"REPLICA_BUCKET": URL, "REPLICA_RUN": "r", "REPLICA_HOST": "127.0.0.1", "REPLICA_PORT": "0"}
TRAIN = (
    f"trainer.train --config trainer/configs/wordle_tiny.yaml --model trainer/policies/wordle-tiny --run r \
--bucket {URL} --replicas http://127.0.0.1:9 --env_url http://127.0.0.1:9 --use_cpu true"
)
COMMANDS = {
    "space": "inference_space.app",
    "dashboard": f"inference_space.dashboard --bucket {URL} --run r",
    "follow": f"delta_weight_sync follow {URL}#r --into followed",
    "trainer": TRAIN,
}
# A program with short limits for requests and for its stop; it has to end with any.
QUICK = """
import runpy, sys
from delta_weight_sync.store import hub
from space_guard import serving

hub.CONNECT_S = hub.REQUEST_TIMEOUT = serving.STOP_S = 2
if sys.argv[1] == "trainer.train":
    from trainer import stop

    stop.END_S = 2
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
STUCK = """
import sys, threading
import space_guard.serving as serving
from delta_weight_sync.scratch import Scratch

serving.STOP_S, scratch = 0.1, Scratch()
threading.Thread(target=threading.Event().wait).start()


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d", "more_body": True})
    while True:
        pass


serving.serve(app, port=int(sys.argv[1]), lifespan="off", log_level="error")
"""


def ended(process: subprocess.Popen[bytes], within_s: float = PATIENCE_S) -> int:
    """The exit code after SIGTERM; nothing that it started is left."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(within_s)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert psutil.wait_procs(family, PATIENCE_S)[1] == []
    return code


@pytest.mark.parametrize(
    "url", [pytest.param(URL, id="hf"), pytest.param(S3, id="s3", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(words, id=name, marks=pytest.mark.long if name in ("space", "trainer") else ())
        for name, words in COMMANDS.items()
    ],
)
def test_a_store_that_takes_connections_and_never_answers_holds_nothing(
    tmp_path: Path, command: str, url: str
) -> None:
    """While the client of S3 waits, no handler of a signal runs. It gives up after minutes."""
    command = command.replace("followed", str(tmp_path / "followed")).replace(URL, url)
    words = [sys.executable, "-c", QUICK, *command.split()]
    with socket.create_server(("127.0.0.1", 0)) as store:
        endpoint = f"http://127.0.0.1:{store.getsockname()[1]}"
        places = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "AWS_ENDPOINT_URL": endpoint}
        places |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "127.0.0.1"}
        places |= {"REPLICA_FOLDER": str(tmp_path / "r"), "TMPDIR": str(tmp_path)}
        environ = os.environ | SPACE | places | {"REPLICA_BUCKET": url}
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=log, stderr=log)
        store.settimeout(5 * PATIENCE_S)
        with store.accept()[0]:
            assert ended(process, 60.0) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert list(tmp_path.glob("delta-weight-sync-*")) == []


def test_a_request_and_a_thread_that_never_end_do_not_hold_a_server(tmp_path: Path) -> None:
    port = free_port()
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(port)], cwd=ROOT, env=environ)
    answered = False
    while not answered:
        assert process.poll() is None
        with contextlib.suppress(OSError):  # it starts
            answered = bool(urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=PATIENCE_S).read(1))
    assert list(tmp_path.iterdir()) != []
    assert ended(process) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_signal_whose_exit_is_swallowed_still_ends_a_server() -> None:
    """As in a `__del__` or a callback, where Python only reports the exception."""
    program = """
import os, signal, time, uvicorn
from space_guard.serving import serve

plain = uvicorn.Config.get_loop_factory


def interrupted(config):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    except SystemExit:
        return plain(config)


uvicorn.Config.get_loop_factory = interrupted
serve(None, host="127.0.0.1", port=0, lifespan="off")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode in (0, 128 + signal.SIGTERM)
