"""A command ends within seconds of a signal, even if Python's own handler of the signal cannot run."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.cli.command import command
from tests.env_space.service import ROOT
from tests.support.real_run import RUN, Drifting
from tests.support.waiting import PATIENCE_S, soon

pytestmark = [pytest.mark.full, pytest.mark.finding("M7")]

ENDS_S = 30.0  # five seconds are promised; the rest is for a busy machine. S3 itself gives up after minutes.
# `follow`, in a process that gives the user's command a year to end.
PATIENT = """
import sys
from delta_weight_sync.cli import main, shell

shell.ENDING_S = 3e7
main()
"""


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """An S3 store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(PATIENCE_S)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield store


def ended(process: subprocess.Popen[bytes], sign: signal.Signals) -> int:
    process.send_signal(sign)
    try:
        return process.wait(ENDS_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_silent_store_does_not_hold_follow_and_the_folder_stays_whole(silent, tmp_path, sign, code):
    run = Drifting(tmp_path / "bucket")
    folder = tmp_path / "followed"
    run.close()
    assert command("follow", run.url, "--into", folder, "--once").code == 0
    words = [sys.executable, "-m", "delta_weight_sync", "follow", f"s3://silent#{RUN}", "--into", folder]
    process = subprocess.Popen(words, cwd=ROOT)
    with silent.accept()[0]:
        assert ended(process, sign) == code
    assert command("follow", run.url, "--into", folder, "--once").code == 0
    assert [path.name for path in folder.glob("0*")] == ["00000000"], "nothing had to be built again"


@pytest.mark.parametrize("words", ["log", "verify", "checkout --out model", "gc --keep 1GB"])
def test_a_silent_store_holds_no_other_command_after_ctrl_c(silent, tmp_path, words):
    name, *options = words.split()
    started = [sys.executable, "-m", "delta_weight_sync", name, f"s3://silent#{RUN}", *options]
    process = subprocess.Popen(started, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)})
    with silent.accept()[0]:
        assert ended(process, signal.SIGINT) == 130
    assert list(tmp_path.iterdir()) == []


def test_the_users_command_ends_with_it_even_if_that_command_ignores_signals(tmp_path):
    run = Drifting(tmp_path / "bucket")
    shell = tmp_path / "shell"
    run.close()
    ignores = f"trap '' TERM; echo $$ > {shell}.new; mv {shell}.new {shell}; sleep 600; sleep 600"
    words = ["follow", run.url, "--into", str(tmp_path / "followed"), "--on-version", ignores]
    process = subprocess.Popen([sys.executable, "-c", PATIENT, *words], cwd=ROOT)
    soon(shell.exists, "the command did not start")
    family = psutil.Process(process.pid).children(recursive=True)
    assert ended(process, signal.SIGTERM) == 0
    assert psutil.wait_procs(family, PATIENCE_S)[1] == []


def test_a_signal_to_a_forked_child_does_not_end_its_parent():
    """The first signal that arrives decides the exit code."""
    program = """
import os, signal, threading
from delta_weight_sync.ending import end_after_signals

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
end_after_signals(1.0, {signal.SIGTERM: 4, signal.SIGINT: 5})
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGINT)
threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == 5
