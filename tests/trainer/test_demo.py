"""`make demo`'s manners: it cleans up after itself, and a fault is one line naming the log and the fix."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from delta_weight_sync import gpu_build
from delta_weight_sync.runlog import (
    CommitEvent,
    DoneEvent,
    ReplicaEvent,
    StepEvent,
    SyncEvent,
    TrafficEvent,
)
from tests.support.waiting import PATIENCE_S, soon
from trainer.demo.__main__ import (
    POLICIES,
    Progress,
    main,
    replica_settings,
    run_demo,
    summarize,
    table,
    trainer_command,
)
from trainer.demo.processes import ChildError, Processes, exclusive, free_port, interrupt_once


def demo(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer.demo", "--folder", str(folder), *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes, text=True)


def wait_for_children(process: subprocess.Popen[str], folder: Path, *, served: bool) -> list[psutil.Process]:
    """The demo's processes, once there are three, and the environment is up if that `served` is asked for."""
    parent = psutil.Process(process.pid)
    log = folder / "env.log"
    if served:
        soon(lambda: log.exists() and "Uvicorn running" in log.read_text(), process.poll)
    soon(lambda: len(parent.children(recursive=True)) >= 3, process.poll)
    return parent.children(recursive=True)


def complaint_of(process: subprocess.Popen[str]) -> str:
    """What it says at its end, which has to be a failure."""
    _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    return complaint


@pytest.mark.full
@pytest.mark.parametrize(("sign", "often"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_interrupts_stop_every_process(tmp_path, sign, often):
    """Once: with a server up, which ends in its own time, and the other processes still starting."""
    process = demo(tmp_path / "demo", PYTHON_DEMO_OF=str(tmp_path))
    wait_for_children(process, tmp_path / "demo", served=not often)
    process.send_signal(sign)
    while often and process.poll() is None:
        process.send_signal(sign)
        time.sleep(0.02)
    assert complaint_of(process) == "stopped; all its processes have ended\n"
    assert process.returncode == 130
    assert left_of(tmp_path) == []


def test_an_interrupt_while_a_child_starts_stops_that_child_too(tmp_path, monkeypatch):
    """It comes when the child runs and nobody has noted it yet."""
    (tmp_path / "idle.py").write_text("import time; time.sleep(600)")
    start = subprocess.Popen
    started = []

    def interrupted(*arguments, **options):
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupt_once()
    try:
        with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:
            processes.start("idle", ["idle"], {"PYTHONPATH": str(tmp_path)})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert started[0].returncode is not None, "it has ended, and was waited for"


def test_ctrl_c_at_a_dashboard_that_stays_up_is_no_failure(tmp_path, monkeypatch, capsys):
    module = "trainer.demo.__main__"
    pressed = SimpleNamespace(Event=lambda: SimpleNamespace(wait=lambda: signal.raise_signal(signal.SIGINT)))
    monkeypatch.setattr(f"{module}.threading", pressed)
    monkeypatch.setattr(f"{module}.summarize", lambda *_: {"verified": True})
    monkeypatch.setattr(f"{module}.table", lambda _: "the table")
    monkeypatch.setattr(Processes, "start", lambda *_, **__: None)
    monkeypatch.setattr(Processes, "finished", lambda *_: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(tmp_path / "demo")])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "press Ctrl-C to end it" in capsys.readouterr().out


@pytest.mark.full
def test_a_demo_that_is_killed_leaves_no_process(tmp_path):
    """It cannot stop anything then: the kernel does, and each process its own."""
    process = demo(tmp_path / "demo", PYTHON_DEMO_OF=str(tmp_path))
    children = wait_for_children(process, tmp_path / "demo", served=True)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    assert left_of(tmp_path) == []


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes that have inherited the demo's variable, wherever they now hang in the tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PYTHON_DEMO_OF") == str(folder):
                found.append(process)
    return found


def test_a_port_in_use_is_one_line_with_the_fix():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fix = f"choose another, for example: make demo PORT={port + 1}"
        with pytest.raises(ChildError, match=f"^port {port} is in use; {fix}$"):
            free_port(port)


@pytest.mark.full
def test_a_child_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.demo.processes._TIMEOUT_S", 1.0)
    (tmp_path / "stubborn.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    before = set(psutil.Process().children(recursive=True))
    with Processes(tmp_path) as processes:
        processes.start("stubborn", ["stubborn"], {"PYTHONPATH": str(tmp_path)})
        while "ready" not in processes.log("stubborn").read_text():
            time.sleep(0.05)
        family = set(psutil.Process().children(recursive=True)) - before
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


@pytest.mark.full
def test_a_second_demo_leaves_the_first_alone(tmp_path):
    with exclusive(tmp_path / "demo"):
        complaint = complaint_of(demo(tmp_path / "demo"))
    assert complaint == f"demo: another demo runs in {tmp_path}/demo; end it first (Ctrl-C)\n"


@pytest.mark.finding("N4")
def test_only_what_an_earlier_demo_left_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.demo.__main__._run", lambda *_: None)
    mine = tmp_path / "mine"
    demos = tmp_path / "demo"
    mine.mkdir()
    for precious in (mine / "thesis", tmp_path / "mine.lock", tmp_path / "file"):
        precious.write_text("precious")
    for folder in (mine, tmp_path / "file"):
        with pytest.raises(ChildError, match="holds other files"):
            run_demo("wordle-tiny", folder, 0, 1.0)
    for _ in range(2):
        run_demo("wordle-tiny", demos, 0, 1.0)
        (demos / "left").touch()
    run_demo("wordle-tiny", demos, 0, 1.0)
    assert sorted(path.name for path in demos.iterdir()) == [".demo", "bucket"]
    assert (mine / "thesis").read_text() == (tmp_path / "mine.lock").read_text() == "precious"


def test_a_replica_that_cannot_start_ends_the_demo_with_its_reason():
    reason = "vLLM did not start: no memory; see the log above for the reason"
    failed = ReplicaEvent(t=0, replica="r", state="starting vLLM", version=None, digest=None, error=reason)
    with pytest.raises(ChildError, match=reason):
        Progress(5).show([failed])


def test_a_child_that_passes_may_end_and_no_other_may(tmp_path):
    (tmp_path / "brief.py").write_text("")
    with Processes(tmp_path) as processes:
        processes.start("passing", ["brief"], {"PYTHONPATH": str(tmp_path)}, may_end=True)
        while not processes.finished("passing"):
            time.sleep(0.02)
        processes.start("needed", ["brief"], {"PYTHONPATH": str(tmp_path)})
        processes._children["needed"].wait(PATIENCE_S)
        reason = rf"^needed stopped \(exit code 0\); the reason is at the end of {tmp_path}/needed.log$"
        with pytest.raises(ChildError, match=reason):
            processes.finished("passing")


def test_priorities_of_children_count_within_one_session(tmp_path):
    """Yet each has a process group of its own: Ctrl-C reaches the demo only."""
    (tmp_path / "told.py").write_text("import os; print(os.nice(0), os.getsid(0), os.getpgid(0), flush=True)")
    with Processes(tmp_path) as processes:
        for name, nice in ("env", 10), ("replica", 0):
            processes.start(name, ["told"], {"PYTHONPATH": str(tmp_path)}, may_end=True, nice=nice)
            child = processes._children[name]
            child.wait(PATIENCE_S)
            expected = f"{min(19, os.nice(0) + nice)} {os.getsid(0)} {child.pid}\n"
            assert processes.log(name).read_text() == expected


@pytest.mark.parametrize("minutes", ["0", "-1", "soon"])
def test_a_demo_without_time_is_refused(minutes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trainer.demo", "--minutes", minutes])
    with pytest.raises(SystemExit):
        main()
    assert "--minutes" in capsys.readouterr().err.splitlines()[-1]


def test_lines_tell_what_is_left_of_the_time(capsys, monkeypatch):
    monkeypatch.setattr("trainer.demo.__main__.time", SimpleNamespace(monotonic=lambda: now))
    now = 100.0
    progress = Progress(5)
    syncs = [event for event in events() if isinstance(event, SyncEvent)]
    steps = [event for event in events() if isinstance(event, StepEvent)]
    progress.show(syncs)
    now = 340.0
    progress.show(steps)
    _, *said = capsys.readouterr().out.splitlines()
    line = "[ 240.0 s] step    0  reward  0.000  trainer v1, replica none  10 B, 4.00 % changed  60 s left"
    assert said == [line], "one line a moment"
    now = 500.0
    assert progress.left_s == 0, "the last step may take longer"


def events(*, replica_digest: str = "b" * 16, replica_version: int = 1) -> list:
    sync = {"t": 0, "sync": 1, "anchor_bytes": 0, "full_bytes": 200, "total": 100}
    sync |= {"diff_s": 0.1, "encode_s": 0.1, "publish_s": 0.5}
    traffic = {"t": 0, "source": "t1-00000000", "since": 0, "trainer": True}
    commit = {"t": 0, "replica": "r", "digest": "b" * 16, "fetch_s": 0, "stage_s": 0, "commit_ms": 1}
    return [
        SyncEvent(version=0, payload_bytes=200, changed=0, **sync),
        TrafficEvent(**traffic, version=0, sent={"anchors": 200, "log": 5}),
        SyncEvent(version=1, payload_bytes=10, changed=4, **sync),
        TrafficEvent(**traffic, version=1, sent={"anchors": 200, "log": 20, "deltas": 10}),
        *(StepEvent(t=0, step=i, reward=i / 10, metrics={}) for i in range(20)),
        CommitEvent(version=1, lag_s=0.7, pause_ms=20, **commit),
        ReplicaEvent(t=0, replica="http://r", state="removed", version=None, digest=None),
        ReplicaEvent(t=0, replica="r", state="serving", version=replica_version, digest=replica_digest),
        DoneEvent(t=0, version=1, digest="b" * 16, stopped_by="time"),
    ]


def test_the_summary_holds_what_the_log_says():
    summary = summarize(events(), "tiny", 250.0)
    wanted = {"verified": True, "syncs": 1, "full_bytes": 200, "digest": "b" * 16, "seconds": 250}
    wanted |= {"reward_first": 0.05, "reward_last": 1.85, "stopped_by": "time"}
    wanted |= {"payload_bytes": 10, "changed": 0.04, "pause_ms": 20, "lag_s": 0.7, "publish_s": 0.5}
    assert summary.items() >= wanted.items()
    text = table(summary)
    assert summary["traffic"]["sent"] == {"deltas": 10, "log": 15}
    assert "25 B, 1/8 of a full sync (mean); the delta 10 B" in text
    assert re.search(r"^  all +25 B +25 B +0 ", text, re.MULTILINE)
    assert "250 s; ended by its time limit" in text


def test_a_run_without_a_replica_or_an_end_or_with_other_weights_is_not_verified():
    for run in (events(replica_digest="c" * 16), events(replica_version=0), [], events()[:-1]):
        assert summarize(run, "tiny", 1.0)["verified"] is False


@pytest.mark.parametrize("for_gpus", [True, False], ids=["gpu", "cpu"])
def test_trainer_and_replica_run_where_the_installed_build_does(tmp_path, monkeypatch, for_gpus):
    monkeypatch.setattr(gpu_build, "is_installed", lambda: for_gpus)
    policy = POLICIES["wordle-tiny"]
    replica = replica_settings(policy, "file:///b", 1, tmp_path)["REPLICA_VLLM_ARGS"]
    trainer = trainer_command(policy, tmp_path, "file:///b", "http://r", "http://e")
    assert ("--use_cpu" in trainer) is not for_gpus
    assert ("--gpu-memory-utilization" in replica) is for_gpus
    quantized = replica_settings(policy, "file:///b", 1, tmp_path, "mxfp8")["REPLICA_VLLM_ARGS"]
    assert quantized == f"{replica} --quantization mxfp8"
    assert "--enforce-eager" not in replica, "on a GPU with CUDA graphs; on a CPU the replica knows"


def test_a_build_for_gpus_without_one_ends_the_demo_with_the_fix(tmp_path, monkeypatch):
    """Before it deletes what the last demo wrote."""
    (tmp_path / "kept").touch()
    monkeypatch.setattr(gpu_build, "problem", lambda: "there is no GPU; attach one")
    with pytest.raises(ChildError, match="attach one"):
        run_demo("wordle-tiny", tmp_path, 0, 5.0)
    assert (tmp_path / "kept").exists()
