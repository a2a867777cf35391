"""A run's log holds what a trainer, a replica or anybody who may write put there; it stays readable."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from delta_weight_sync.records import Keys, LogKey
from delta_weight_sync.runlog import (
    LINE,
    DoneEvent,
    Event,
    ReplicaReport,
    Rollout,
    RunLogReader,
    RunLogWriter,
    StepEvent,
    TrafficEvent,
)
from delta_weight_sync.store import Bucket, open_bucket
from tests.support.http_server import answering
from tests.support.records import WRITER, commit, put_flush, status, sync
from tests.support.waiting import soon
from trainer import observe
from trainer.observe import ReplicaWatch
from trainer.spaces import Fleet

pytestmark = pytest.mark.finding(11)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(tmp_path.as_uri(), create=True)


def logged(bucket: Bucket, *lines: bytes | Event, flush: int = 0) -> None:
    """A flush of the log of run `r`, line by line."""
    whole = [line if isinstance(line, bytes) else line.model_dump_json().encode() for line in lines]
    put_flush(bucket, "r", whole, number=flush)


def changed(event: Event, **fields: object) -> bytes:
    """An event as JSON that says something else."""
    return json.dumps(event.model_dump() | fields).encode()


def read(bucket: Bucket) -> tuple[list[Event], int]:
    reader = RunLogReader(bucket, "r")
    return list(reader.poll()), reader.skipped


BAD = {
    "no JSON": b"{",
    "no event": b'{"kind":"surprise"}',
    "null for a number": changed(commit("x", 1), lag_s=None),
    "NaN": changed(commit("x", 1), lag_s=float("nan")),
    "infinite": changed(commit("x", 1), t=float("inf")),
    "a time without a calendar": changed(sync(1, 9), t=1e300),
    "a number that no sum holds": changed(commit("x", 1), pause_ms=1e308),
    "a version of 4001 digits": changed(sync(1, 9)).replace(b'"version": 1', b'"version": ' + b"9" * 4001),
    "negative": changed(sync(1, 9), payload_bytes=-1),
    "nested": b"[" * 100_000,
    "half a character": changed(status("x", 1), replica="\ud800"),
    "long": changed(status("x", 1), state="x" * LINE),
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_skipped_and_counted(bucket: Bucket, kind: str) -> None:
    logged(bucket, sync(0, 1100), BAD[kind], commit("x", 0))
    events, skipped = read(bucket)
    assert events == [sync(0, 1100), commit("x", 0)]
    assert skipped == 1


def test_what_a_replica_says_is_cut_to_a_length(bucket: Bucket) -> None:
    logged(bucket, sync(0, 1100), status("x" * 10_000, 1, state="y" * 100_000))
    _, said = read(bucket)[0]
    assert (len(said.replica), len(said.state)) == (200, 4000)


BOUNDS = {
    "string": {"maxLength", "pattern", "const", "enum"},
    "integer": {"maximum"},
    "number": {"maximum", "exclusiveMaximum"},
    "array": {"maxItems"},
}


def unbounded(schema: object, at: str) -> Iterator[str]:
    """The places of a JSON schema where a record may say as much as it likes."""
    for name, part in schema.items() if isinstance(schema, dict) else ():
        yield from unbounded(part, f"{at}.{name}")
    if isinstance(schema, dict) and isinstance(kind := schema.get("type"), str):
        free = schema.get("additionalProperties", kind == "object") and "maxProperties" not in schema
        if free or not BOUNDS.get(kind, schema.keys()) & schema.keys():
            yield at
    elif isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from unbounded(part, f"{at}.{number}")


@pytest.mark.finding("N2")
@pytest.mark.finding("N19")
def test_every_field_of_every_event_is_bounded() -> None:
    assert list(unbounded(TypeAdapter(Event).json_schema(), "event")) == []
    assert list(unbounded(ReplicaReport.model_json_schema(), "report")) == []


def test_an_object_that_unpacks_to_too_much_or_not_at_all_is_left_out(bucket: Bucket) -> None:
    logged(bucket, b"x" * (9 << 20))
    bucket.put(Keys("r").log_part(LogKey(WRITER, 1, 1)), b"not compressed")
    bucket.put(Keys("r").log_part(LogKey(WRITER, 2, 2)), b"?" * (9 << 20))
    logged(bucket, sync(0, 1100), flush=3)
    assert read(bucket) == ([sync(0, 1100)], 3)


def test_reading_goes_on_after_bad_lines_and_counts_each_once(bucket: Bucket) -> None:
    reader = RunLogReader(bucket, "r")
    for flush in range(3):
        logged(bucket, b"{", status("x", flush), flush=flush)
        assert list(reader.poll()) == [status("x", flush)]
        assert reader.skipped == flush + 1
    assert list(reader.poll()) == []


def test_a_reader_that_stops_within_a_flush_goes_on_there(bucket: Bucket) -> None:
    logged(bucket, sync(0, 1100), b"{", sync(1, 9), sync(2, 9))
    reader = RunLogReader(bucket, "r")
    events = reader.poll()
    assert next(events) == sync(0, 1100)
    events.close()
    assert list(reader.poll()) == [sync(1, 9), sync(2, 9)]


def reported(**fields: object) -> bytes:
    """A report with one commit, which says something else."""
    said = [event.model_dump() for event in (status("x", 1), commit("x", 1))]
    return json.dumps({"status": said[0], "commits": [said[1] | fields]}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        reported(lag_s=float("nan")),
        reported(lag_s=float("-inf")),
        reported(t=1e300),
        reported(version=10**4000),
        reported(replica="\ud800"),
        b"[" * 100_000,
        reported() + b" " * (4 << 20),
        reported(),
    ],
    ids=["NaN", "infinite", "t", "version", "surrogate", "nested", "long", "sound"],
)
def test_what_a_replica_answers_cannot_break_the_log(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(observe, "_POLL_S", 0.01)
    with answering(lambda _: (200, {}, answer)) as url:
        log = RunLogWriter(bucket, "r", WRITER, every_s=0.01)
        watch = ReplicaWatch(Fleet(["http://mistyped:80x", url]), log)
        soon(lambda: url in watch._last)
        watch.close()
        log.append(DoneEvent(t=1.0, version=1, digest="0" * 16))
        log.close()
    events, skipped = read(bucket)
    assert skipped == 0
    assert isinstance(events[-1], DoneEvent)
    assert events[1].kind == ("commit" if answer == reported() else "replica")


def test_a_replica_reports_no_traffic_but_its_own(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_POLL_S", 0.01)
    lie = TrafficEvent(t=1.0, source=str(WRITER), since=1.0, trainer=True, version=0, sent={"deltas": 10**12})
    report = ReplicaReport(status=status("x", 1), commits=(commit("x", 1),), traffic=lie)
    with answering(lambda _: (200, {}, report.model_dump_json().encode())) as url:
        log = RunLogWriter(bucket, "r", WRITER, every_s=0.01)
        watch = ReplicaWatch(Fleet([url]), log)
        soon(lambda: url in watch._last)
        watch.close()
        log.close()
    (event,) = (event for event in read(bucket)[0] if isinstance(event, TrafficEvent))
    assert (event.source, event.trainer, event.version) == ("x", False, None)


@pytest.mark.parametrize("text", ["\ud800", "x" * (LINE + 1), "\x00\x1b[2J"])
def test_what_a_model_or_an_environment_wrote_cannot_stop_the_log(bucket: Bucket, text: str) -> None:
    log = RunLogWriter(bucket, "r", WRITER, every_s=3600)
    rollouts = (Rollout(turns=((text, text),) * 3, reward=1.0, sync=0),)
    log.append(StepEvent(t=0, step=1, reward=1.0, metrics={}, prompt=text, rollouts=rollouts))
    log.append(sync(0, 9))
    log.close()
    events, skipped = read(bucket)
    assert (len(events), skipped) == (2, 0)


def test_strange_objects_beside_the_log_leave_no_gap_in_it(bucket: Bucket) -> None:
    for name in ("a", "b", "99999999.jsonl", f"00000001.{'0' * 32}.00000007-00000003.jsonl.zst"):
        bucket.put(f"runs/r/log/{name}", b"?")
    log = RunLogWriter(bucket, "r", WRITER, every_s=3600)
    log.append(sync(0, 9))
    log.close()
    assert read(bucket) == ([sync(0, 9)], 0)
