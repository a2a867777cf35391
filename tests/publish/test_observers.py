"""What watches a run cannot stop it: callbacks, log, counters and notifications fail alone."""

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from delta_weight_sync import Publisher, codec, runlog
from delta_weight_sync.errors import AccessDeniedError, BucketUnreachableError
from delta_weight_sync.publish import outbox, reports
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import RunLogReader, RunLogWriter, StepEvent, SyncEvent
from delta_weight_sync.store._files import FileBucket
from delta_weight_sync.store.ledger import Ledger, Traffic
from delta_weight_sync.util import SafeLogger
from tests.support.real_run import Drifting
from tests.support.waiting import PATIENCE_S, soon
from trainer import observe
from trainer.observe import Pokes, ReplicaWatch, StepRecorder

VERSIONS = 100
FAULT = "the observer is broken"


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError(FAULT)


def is_cancelled() -> None:
    raise asyncio.CancelledError(FAULT)


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("this error has no text")


def fails_without_text() -> None:
    raise WithoutTextError


# What a user's `on_version` does from version 1 on.
CALLBACKS: dict[str, Callable[[], object]] = {
    "a user's callback": fails,
    "a user's callback exits": lambda: sys.exit(FAULT),
    "a user's callback is cancelled": is_cancelled,
    "a user's callback raises an error without text": fails_without_text,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"w": torch.zeros(64, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return folder


def put_but(refused: Callable[[str], bool], error: type[Exception]) -> Callable[..., None]:
    stored = FileBucket._put

    def put(self: FileBucket, key: str, data: Any) -> None:
        if refused(key):
            raise error(FAULT)
        stored(self, key, data)

    return put


def log_is_refused(error: type[Exception]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(FileBucket, "_put", put_but(lambda key: "/log/" in key, error))


# What is broken -> how, and what the one line about it says.
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    **dict.fromkeys(CALLBACKS, (lambda patch: None, "the function `on_version` failed")),
    "the store refuses the log": (log_is_refused(AccessDeniedError), "the run's log failed"),
    "the store loses the log": (log_is_refused(BucketUnreachableError), "the run's log failed"),
    "an event cannot be made": (
        lambda patch: patch.setattr(runlog, "_line", fails),
        "the run's log failed",
    ),
    "the log cannot be compressed": (
        lambda patch: patch.setattr(runlog, "_compressed", fails),
        "the run's log failed",
    ),
    "a counter fails": (
        lambda patch: patch.setattr(Ledger, "counts", fails),
        "the log of a published version failed",
    ),
    "a counter goes back": (
        lambda patch: patch.setattr(Ledger, "counts", lambda _: {"deltas": Traffic(-1, -1, -1)}),
        "the log of a published version failed",
    ),
    "an event of a version cannot be made": (
        lambda patch: patch.setattr("delta_weight_sync.publish.reports.sync_event", fails),
        "the log of a published version failed",
    ),
}


@pytest.mark.finding("M1")
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.full
def test_a_hundred_versions_follow_on_a_broken_observer(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    breaks, line = BROKEN[what]
    url = (tmp_path / "bucket").as_uri()
    weights = torch.zeros(64, dtype=torch.bfloat16)
    called: list[int] = []

    def on_version(manifest: Any) -> None:
        called.append(manifest.version)
        if manifest.version and what in CALLBACKS:
            CALLBACKS[what]()

    with caplog.at_level(logging.WARNING), Publisher(url, base, on_version=on_version) as publisher:
        publisher.publish({"w": weights})
        breaks(monkeypatch)
        for version in range(1, VERSIONS + 1):
            weights[version % 64] += 1
            publisher.publish({"w": weights})
            assert publisher.flush().version == version
    monkeypatch.undo()
    newest = open_run(url).newest()
    assert newest is not None
    assert newest.version == VERSIONS
    assert called == list(range(VERSIONS + 1))
    said = [record.message for record in caplog.records if "failed (" in record.message]
    assert [message for message in said if message.startswith(line)] == said[:1]
    assert len(said) == 1, said


def test_a_callback_that_never_returns_stops_neither_publishing_nor_close(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_CLOSING_S", 0.1)
    returns = threading.Event()
    called: list[int] = []
    threads: list[threading.Thread] = []

    def on_version(manifest: Any) -> None:
        called.append(manifest.version)
        threads.append(threading.current_thread())
        if manifest.version == 1:
            returns.wait()

    publisher = Publisher((tmp_path / "bucket").as_uri(), base, on_version=on_version)
    try:
        for version in range(4):
            publisher.publish({"w": torch.full((64,), float(version), dtype=torch.bfloat16)})
            assert publisher.flush(PATIENCE_S).version == version
        closing = threading.Thread(target=publisher.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    finally:
        returns.set()
    assert "the function `on_version` runs" in caplog.text
    threads[0].join(PATIENCE_S)
    assert called == [0, 1], "after `close`, it is called no more"
    assert threads[0] is threads[1]
    assert threads[0].daemon


def test_what_a_slow_callback_logs_before_the_end_is_in_the_log(base: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    flushed = threading.Event()

    def on_version(manifest: Any) -> None:
        flushed.wait(PATIENCE_S)
        assert publisher.log
        publisher.log.append(StepEvent(t=1.0, step=manifest.version, reward=0.0, metrics={}))

    publisher = Publisher(url, base, on_version=on_version)
    for version in range(3):
        publisher.publish({"w": torch.full((64,), float(version), dtype=torch.bfloat16)})
        publisher.flush()
    flushed.set()
    publisher.close()
    events = [*RunLogReader(open_run(url).bucket, "main").poll()]
    assert [event.step for event in events if isinstance(event, StepEvent)] == [0, 1, 2]


@pytest.fixture
def raising_filter() -> Iterator[None]:
    """A filter of the user's, of the library's log, that raises."""
    log = logging.getLogger("delta_weight_sync")
    log.addFilter(fails)
    yield
    log.removeFilter(fails)


@pytest.mark.usefixtures("raising_filter")
def test_a_log_that_raises_does_not_stop_the_retry_that_it_reports(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_RETRY_S", 0.0)
    weights = torch.zeros(64, dtype=torch.bfloat16)
    refusals = [True] * 4
    with Publisher((tmp_path / "bucket").as_uri(), base) as publisher:
        publisher.publish({"w": weights})
        fault = put_but(lambda key: "/deltas/" in key and bool(refusals) and refusals.pop(), OSError)
        monkeypatch.setattr(FileBucket, "_put", fault)
        publisher.publish({"w": weights + 1})
        assert publisher.flush().version == 1
    assert not refusals


@pytest.mark.usefixtures("raising_filter")
def test_a_log_that_raises_does_not_end_the_thread_that_makes_jumps(tmp_path: Path) -> None:
    with contextlib.closing(Drifting(tmp_path / "bucket")) as run:
        put = run.outbox.shortcuts._writer.put_jump
        run.outbox.shortcuts._writer.put_jump = fails
        run.steps(8)
        run.outbox.shortcuts._writer.put_jump = put
        run.steps(9)
        assert (8, 16) in [(jump.base, jump.version) for jump in run.newest.jumps]


def test_a_line_of_the_log_names_the_file_that_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    SafeLogger().warning("%s at %d", "here", 1)
    assert [(each.filename, each.message) for each in caplog.records] == [("test_observers.py", "here at 1")]


@pytest.mark.parametrize("error", [AccessDeniedError, BucketUnreachableError])
def test_a_log_that_was_never_stored_stops_no_version(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    weights = torch.zeros(64, dtype=torch.bfloat16)
    log_is_refused(error)(monkeypatch)
    with Publisher(url, base) as publisher:
        for version in range(3):
            publisher.publish({"w": weights + version})
            assert publisher.flush().version == version


def test_whatever_ends_the_publishing_thread_reaches_the_trainer(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.zeros(64, dtype=torch.bfloat16)
    publisher = Publisher((tmp_path / "bucket").as_uri(), base)
    publisher.publish({"w": weights})
    monkeypatch.setattr(codec, "encode", lambda *_, **__: sys.exit(FAULT))
    publisher.publish({"w": weights + 1})
    with pytest.raises(SystemExit, match=FAULT):
        publisher.flush()
    publisher.close()


def test_the_log_goes_on_when_its_store_does(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "bucket").as_uri()
    weights = torch.zeros(64, dtype=torch.bfloat16)
    with Publisher(url, base) as publisher:
        for version in range(20):
            if version == 5:
                log_is_refused(BucketUnreachableError)(monkeypatch)
            if version == 15:
                monkeypatch.undo()
            weights[version] += 1
            publisher.publish({"w": weights})
            publisher.flush()
    events = RunLogReader(open_run(url).bucket, "main").poll()
    assert [event.version for event in events if isinstance(event, SyncEvent)] == list(range(20))


@pytest.mark.full
def test_trainers_that_take_the_run_from_each_other_leave_a_whole_log(base: Path, tmp_path: Path) -> None:
    """Each one's versions are in the log in their order, although none of them was closed in time."""
    url = (tmp_path / "bucket").as_uri()
    weights = torch.zeros(64, dtype=torch.bfloat16)
    trainers: list[Publisher] = []
    for number in range(50):
        publisher = Publisher(url, base)
        for _ in range(2):
            weights[number] += 1
            publisher.publish({"w": weights})
            publisher.flush()
        assert publisher.log
        publisher.log.append(StepEvent(t=1.0, step=number, reward=0.0, metrics={}))
        if trainers:
            trainers[-1].close()  # only now, after its successor has published
        trainers.append(publisher)
    trainers[-1].close()
    events = [*RunLogReader(open_run(url).bucket, "main").poll()]
    newest = open_run(url).newest()
    assert newest is not None
    syncs = [event.version for event in events if isinstance(event, SyncEvent)]
    assert syncs == list(range(newest.version + 1))
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(range(50))


def test_a_killed_trainers_last_version_is_logged_by_the_next(base: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    weights = torch.zeros(64, dtype=torch.bfloat16)
    killed = Publisher(url, base)
    for _ in range(3):
        weights += 1
        killed.publish({"w": weights})
        killed.flush()
    assert killed.log
    killed.log._bucket = None  # type: ignore[assignment] # nothing that it still has reaches the store
    with Publisher(url, base) as publisher:
        weights += 1
        publisher.publish({"w": weights})
    events = RunLogReader(open_run(url).bucket, "main").poll()
    assert [event.version for event in events if isinstance(event, SyncEvent)] == [0, 1, 2, 3]


class BrokenFleet:
    def urls(self) -> list[str]:
        return fails()


def test_the_trainers_own_observers_fail_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observe, "_POLL_S", 0.001)
    fleet: Any = BrokenFleet()
    log: Any = SimpleNamespace(append=fails)
    sample = SimpleNamespace(group_id=1, rates=None)
    recorder = StepRecorder(log, SimpleNamespace(get=lambda: sample))
    with caplog.at_level(logging.WARNING):
        pokes = Pokes(fleet)
        watch = ReplicaWatch(fleet, log)
        for step in range(VERSIONS):
            pokes.send()
            assert recorder.get() is sample
            recorder.on_log(None, SimpleNamespace(global_step=step), None, {"reward": 1.0})
        pokes.close()
        soon(lambda: "the watch over the replicas failed" in caplog.text)
        time.sleep(0.05)  # time for some more rounds of the watch
        assert watch._thread.is_alive()
        watch.close()
    said = [record.message.partition(" failed")[0] for record in caplog.records]
    assert said.count("the notification of a replica") == 1
    assert said.count("the watch over the replicas") == 1
    assert said.count("the record of a step") == 2, "samples, and steps"


def test_a_log_that_cannot_be_closed_ends_no_trainer(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher((tmp_path / "bucket").as_uri(), base) as publisher:
        publisher.publish({"w": torch.ones(64, dtype=torch.bfloat16)})
        publisher.flush()
        monkeypatch.setattr(RunLogWriter, "flush", fails)
