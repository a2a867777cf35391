"""Pokes reach every replica with the key, and samples and their rates reach the run's log."""

import queue
import socket
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from delta_weight_sync.runlog import (
    CommitEvent,
    ReplicaEvent,
    ReplicaReport,
    RunLogReader,
    RunLogWriter,
    StepEvent,
)
from delta_weight_sync.store import open_bucket
from tests.support import recorded
from tests.support.http_server import BODY, Request, answering, dripping
from tests.support.records import WRITER, commit, status
from tests.support.waiting import PATIENCE_S, soon
from tests.trainer.test_spaces import watch
from trainer import observe, spaces
from trainer.observe import Pokes, ReplicaWatch, StepRecorder
from trainer.samples import TracedSample
from trainer.spaces import Fleet

KEY = "the-key-of-this-deployment"
CRANE = "c1-r2?a3+n4-e5-"
PLUMB = "p1+l2+u3+m4+b5+"


class Replica:
    """Takes pokes; while `gate` is closed it does not answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.hangs_up = False
        self.gate = threading.Event()
        self.came = threading.Semaphore(0)
        self.gate.set()

    def is_poked(self) -> bool:
        return self.came.acquire(timeout=60.0)

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((request.path, request.headers.get("x-space-key", "")))
        self.came.release()
        self.gate.wait(60.0)
        if self.hangs_up:
            raise ConnectionAbortedError
        return 200, {}, b""


def test_every_replica_is_poked_though_one_is_gone_and_one_is_slow(monkeypatch):
    monkeypatch.setattr(observe, "POKE_TIMEOUT_S", 60.0)
    monkeypatch.setenv("SPACE_KEY", KEY)
    well = Replica()
    slow = Replica()
    slow.gate.clear()
    with answering(well.answer) as url, answering(slow.answer) as slow_url:
        monkeypatch.setenv("SPACES", f"{url} {slow_url}")
        sent = Pokes(Fleet(["http://127.0.0.1:9", slow_url, url]))
        for _ in range(3):
            sent.send()
            assert well.is_poked()
        assert well.asked == [("/delta_weight_sync/poke", KEY)] * 3
        assert slow.is_poked()
        assert len(slow.asked) == 1, "one at a time"
        slow.gate.set()
        assert slow.is_poked(), "and one more for all that came meanwhile"
        well.hangs_up = True
        for _ in range(2):
            sent.send()
            assert well.is_poked(), "one that hangs up is poked again"
        (thread,) = sent._pools[slow_url]._threads
        sent._fleet = Fleet([url])
        sent.send()
        soon(lambda: not thread.is_alive())
        sent.close()


def test_an_endless_answer_to_a_poke_is_not_read_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sent = Pokes(Fleet([f"http://127.0.0.1:{server.getsockname()[1]}"]))
        sent.send()
        with server.accept()[0] as replica, pytest.raises(ConnectionError):
            replica.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100 << 20))
        sent.close()


def test_a_status_that_drips_hides_no_other_replica(tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "_POLL_S", 0.01)
    monkeypatch.setattr(spaces, "_READ_S", 0.1)
    report = ReplicaReport(status=status("r", 3), commits=()).model_dump_json()
    log = RunLogWriter(open_bucket(tmp_path.as_uri(), create=True), "run", WRITER)
    with dripping(BODY) as slow, answering(lambda _: (200, {}, report.encode())) as well:
        watch = ReplicaWatch(Fleet([slow, well]), log)
        soon(lambda: len(watch._last) == 2)
        assert [event.state for event in watch._last.values()] == ["unreachable", "serving"]
        watch.close()


@pytest.mark.parametrize("start", [BODY, b"HTTP/1.1 200 OK\r\nX: "], ids=["body", "headers"])
def test_an_answer_to_a_poke_that_drips_does_not_keep_the_trainer_from_ending(start, monkeypatch):
    monkeypatch.setattr(observe, "POKE_TIMEOUT_S", 0.1)
    with dripping(start) as url:
        sent = Pokes(Fleet([url]))
        sent.send()
        closing = threading.Thread(target=sent.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        (poke,) = sent._last.values()
        soon(poke.done, "its thread ends, too, or the interpreter would wait for it")


def test_a_replica_that_tells_its_name_is_no_longer_logged_under_its_url(tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "_POLL_S", 0.01)
    report = ReplicaReport(status=status("r", 3), commits=()).model_dump_json()
    down = iter([(503, {}, b"")])
    with answering(lambda _: next(down, (200, {}, report.encode()))) as url:
        watch(tmp_path, url, 3)
    states = [(e.replica, e.state) for e in RunLogReader(open_bucket(tmp_path.as_uri()), "run").poll()]
    assert states == [(url, "unreachable"), (url, "removed"), ("r", "serving")]


def test_two_replicas_of_one_name_are_recorded_apart(tmp_path, monkeypatch, caplog):
    """By default, each replica has the name of its machine."""
    monkeypatch.setattr(observe, "_POLL_S", 0.01)

    def reports(version: int) -> bytes:
        commits = (commit("box", version),)
        return ReplicaReport(status=status("box", version), commits=commits).model_dump_json().encode()

    bucket = open_bucket(tmp_path.as_uri(), create=True)
    log = RunLogWriter(bucket, "run", WRITER)
    with (
        answering(lambda _: (200, {}, reports(7))) as first,
        answering(lambda _: (200, {}, reports(3))) as second,
    ):
        listed = tmp_path / "replicas"
        listed.write_text(f"{first}\n{second}\n")
        asking = ReplicaWatch(Fleet([str(listed)]), log)
        soon(lambda: len(asking._last) == 2)
        listed.write_text(second)
        soon(lambda: [last.replica for last in asking._last.values()] == ["box"])
        asking.close()
    log.close()
    events = list(RunLogReader(bucket, "run").poll())
    apart = f"box ({second})"
    assert {(e.replica, e.version) for e in events if isinstance(e, CommitEvent)} == {("box", 7), (apart, 3)}
    states = [(e.replica, e.state) for e in events if isinstance(e, ReplicaEvent)]
    both = [("box", "serving"), (apart, "serving")]
    assert states == [*both, ("box", "removed"), (apart, "removed"), ("box", "serving")]
    (said,) = [record.getMessage() for record in caplog.records if "have the name" in record.getMessage()]
    assert f"{second} is recorded as '{apart}': set its REPLICA_NAME" in said


def sample(
    group: int, reward: float, *turns: tuple[str, str], rates: dict[str, tuple[int, int]]
) -> TracedSample:
    messages: list[dict] = []
    for word, answer in turns:
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "name": "guess", "content": answer}]
    prompt = [{"role": "user", "content": "Play <b>Wordle</b>."}]
    said = {"prompt": prompt, "completion": messages, "metrics": {"reward": reward}, "rates": rates}
    made = asdict(recorded.sample(group)) | {"model_version": 3, "token_syncs": np.array([3])}
    return TracedSample(**made | said)


def played(solved: int, invalid: int, guesses: int) -> dict[str, tuple[int, int]]:
    return {"games/solve_rate": (solved, 1), "games/invalid_rate": (invalid, guesses)}


@pytest.mark.parametrize("done", [0, 6])
def test_a_group_and_its_rates_reach_the_log_of_a_new_run_before_its_first_step(tmp_path, done):
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    samples: queue.Queue[TracedSample] = queue.Queue()
    samples.put(sample(1, 1.5, ("crane", CRANE), ("plumb", PLUMB), rates=played(1, 0, 2)))
    samples.put(sample(1, 0.2, ("zzzzz", "not a word"), ("crane", CRANE), rates=played(0, 1, 2)))
    samples.put(sample(2, 0.4, ("crane", CRANE), rates=played(0, 0, 1)))
    log = RunLogWriter(bucket, "wordle", WRITER)
    recorder = StepRecorder(log, samples)
    recorder.on_train_begin(None, SimpleNamespace(global_step=done), None)
    assert [recorder.get(timeout=60).group_id for _ in range(3)] == [1, 1, 2]
    assert recorder.qsize() == 0, "everything else is the queue's"
    recorder.on_log(None, SimpleNamespace(global_step=7), None, {"reward": 0.7})
    log.close()

    *first, step = RunLogReader(bucket, "wordle").poll()
    assert isinstance(step, StepEvent)
    assert [event.metrics for event in first] == ([] if done else [{"sample/taken": 2.0}])
    (*_, group) = step, *first
    assert (step.step, group.prompt) == (7, "Play <b>Wordle</b>.")
    assert [(rollout.reward, rollout.sync) for rollout in group.rollouts] == [(1.5, 3), (0.2, 3)]
    assert group.rollouts[0].turns == (("crane", CRANE), ("plumb", PLUMB))
    assert step.metrics == {"reward": 0.7, "games/solve_rate": 0.333333, "games/invalid_rate": 0.2}


def test_the_rates_of_a_step_are_those_of_its_own_conversations(tmp_path):
    """An environment counts what it likes; a rate of nothing is left out."""
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    samples: queue.Queue[TracedSample] = queue.Queue()
    log = RunLogWriter(bucket, "chats", WRITER)
    recorder = StepRecorder(log, samples)
    for step, counts in enumerate([(0, 1), (1, 1)], 1):
        for count in counts:
            rates = {"chats/asked_twice": (count, 1), "chats/never": (0, 0)}
            samples.put(sample(step, 1.0, ("why", "because"), rates=rates))
            recorder.get(timeout=60)
        recorder.on_log(None, SimpleNamespace(global_step=step), None, {"reward": 1.0})
    log.close()
    steps = RunLogReader(bucket, "chats").poll()
    assert [step.metrics for step in steps] == [
        {"reward": 1.0, "chats/asked_twice": rate} for rate in (0.5, 1.0)
    ]
