"""The log of a run: written once, small, complete and in order, whoever writes it and however it ends."""

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from delta_weight_sync.errors import BucketUnreachableError
from delta_weight_sync.records import LogKey, Writer
from delta_weight_sync.runlog import (
    SEGMENT,
    VERSION_BYTES,
    Event,
    Rollout,
    RunLogReader,
    RunLogWriter,
    StepEvent,
    SyncEvent,
)
from delta_weight_sync.store import Bucket, open_bucket
from tests.support.records import commit, manifest_of, put_flush, sync
from tests.support.waiting import soon

LATER = Writer(2, "1" * 32)
FIRST = Writer(1, "0" * 32)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(tmp_path.as_uri(), create=True)


def writer(bucket: Bucket, who: Writer = FIRST, every_s: float = 3600) -> RunLogWriter:
    return RunLogWriter(bucket, "r", who, every_s=every_s)


def ride(log: RunLogWriter, bucket: Bucket) -> None:
    """What a published version does with the log."""
    with log.riding() as objects:
        bucket.put_all(objects)


def steps(bucket: Bucket) -> list[int]:
    return [event.step for event in RunLogReader(bucket, "r").poll() if isinstance(event, StepEvent)]


def step(number: int, **fields: Any) -> StepEvent:
    return StepEvent(t=number, step=number, reward=0.5, metrics={"loss": number / 7}, **fields)


def test_each_event_is_written_at_most_twice_and_a_long_log_is_read_by_few_requests(bucket: Bucket) -> None:
    log = writer(bucket)
    versions = 5 * SEGMENT + 7
    for number in range(versions):
        log.append(sync(number, 20_000))
        log.append(step(number))
        ride(log, bucket)
        if number % 50 == 0:
            log._compact()  # the writer's own thread does this from time to time
    log.close()
    flushes = bucket.ledger.counts()["log"].sent
    stored = sum(info.size for info in bucket.list("runs/r/log/"))
    assert flushes < versions * VERSION_BYTES / 4
    assert stored < flushes / 2
    before = bucket.ledger.counts()
    assert steps(bucket) == list(range(versions))
    after = bucket.ledger.counts()
    assert after["log"].requests - before["log"].requests <= 8
    assert after["polls"].requests - before["polls"].requests == 1


def test_a_reader_misses_and_repeats_nothing_while_flushes_become_segments(bucket: Bucket) -> None:
    log = writer(bucket)
    readers = [RunLogReader(bucket, "r", list_every_s=every_s) for every_s in (0.0, 1e9)]
    seen: list[list[int]] = [[], []]
    for number in range(3 * SEGMENT):
        log.append(step(number))
        ride(log, bucket)
        if number % 60 == 59:
            log._compact()
        for reader, known in zip(readers, seen, strict=True):
            if number % 7 == 0:
                known += [event.step for event in reader.poll() if isinstance(event, StepEvent)]
    log.close()
    seen[0] += [event.step for event in readers[0].poll() if isinstance(event, StepEvent)]
    assert seen[0] == list(range(3 * SEGMENT))
    assert seen[1] == list(range(len(seen[1])))
    assert len(seen[1]) >= SEGMENT - 60, "it asked only for the next flush, until that was gone"


def test_two_trainers_that_take_the_run_from_each_other_lose_no_event(bucket: Bucket) -> None:
    """50 trainers, each of which goes on writing after the next one has begun."""
    logs: list[RunLogWriter] = []
    expected: list[int] = []
    for term in range(1, 51):
        logs.append(writer(bucket, Writer(term, f"{term:032x}"), every_s=0.01))
        for number in range(10):
            logs[-1].append(step(100 * term + number))
            ride(logs[-1], bucket)
        if term > 1:
            logs[-2].append(step(100 * (term - 1) + 10))  # after its successor
            logs[-2].close()
        expected += [100 * term + number for number in range(11 if term < 50 else 10)]
    logs[-1].close()
    assert steps(bucket) == expected


def test_a_reader_finds_what_an_earlier_trainer_writes_late(bucket: Bucket) -> None:
    first = writer(bucket)
    later = writer(bucket, LATER)
    reader = RunLogReader(bucket, "r")
    first.append(step(1))
    first.flush()
    later.append(step(2))
    later.flush()
    assert [event.t for event in reader.poll()] == [1, 2]
    first.append(step(3))
    first.close()
    later.append(step(4))
    later.close()
    assert [event.t for event in reader.poll()] == [3, 4]


class RefusingBucket:
    """Stores everything but the log, while `refuses`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.refuses = True
        self.report_every_s = 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def put(self, key: str, data: bytes) -> None:
        if self.refuses and "/log/" in key:
            raise BucketUnreachableError("the log is not taken")
        self._bucket.put(key, data)

    def put_all(self, objects: Any) -> None:
        for key, data in objects:
            self.put(key, data)


def test_a_log_that_the_store_refuses_rides_again_once_it_was_stored(bucket: Bucket) -> None:
    refusing: Any = RefusingBucket(bucket)
    log = RunLogWriter(refusing, "r", FIRST, every_s=3600)
    log.append(step(1))
    with pytest.raises(BucketUnreachableError):
        ride(log, refusing)
    log.append(step(2))
    with log.riding() as objects:
        assert not objects
    refusing.refuses = False
    log.flush()
    log.append(step(3))
    with log.riding() as objects:
        assert len(objects) == 1
        bucket.put_all(objects)
    log.close()
    assert steps(bucket) == [1, 2, 3]


def test_events_without_a_version_are_uploaded_after_a_while(bucket: Bucket) -> None:
    log = writer(bucket, every_s=0.01)
    log.append(commit("x", 1))
    soon(lambda: [*RunLogReader(bucket, "r").poll()] == [commit("x", 1)])
    log.close()


def test_rollouts_are_sampled_to_fit_and_steps_are_not(bucket: Bucket) -> None:
    chance = random.Random(0)

    def rollouts() -> tuple[Rollout, ...]:
        texts = [chance.randbytes(250).hex() for _ in range(16)]
        return tuple(Rollout(turns=((text, ""),), reward=1.0, sync=0) for text in texts)

    log = writer(bucket)
    versions = 100
    for number in range(versions):
        log.append(sync(number, 5000))
        log.append(step(number, rollouts=rollouts()))
        ride(log, bucket)
    log.close()
    events: list[Event] = [*RunLogReader(bucket, "r").poll()]
    shown = [len(event.rollouts) for event in events if isinstance(event, StepEvent)]
    assert len(shown) == versions
    assert 0 < sum(shown) < 16 * versions
    assert bucket.ledger.counts()["log"].sent < versions * VERSION_BYTES + 8 * VERSION_BYTES


def test_a_large_model_pays_for_all_its_rollouts(bucket: Bucket) -> None:
    log = writer(bucket)
    rollouts = tuple(Rollout(turns=(("x" * 600, "y" * 600),) * 6, reward=1.0, sync=0) for _ in range(8))
    for number in range(20):
        log.append(sync(number, 7_000_000))
        log.append(step(number, rollouts=rollouts))
        ride(log, bucket)
    log.close()
    events = RunLogReader(bucket, "r").poll()
    assert [len(event.rollouts) for event in events if isinstance(event, StepEvent)] == [8] * 20


def test_an_event_that_cannot_be_written_is_left_out_and_said_once(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    log = writer(bucket)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.append(object())  # type: ignore[arg-type]
    log.append(sync(1, 9))
    log.close()
    assert [*RunLogReader(bucket, "r").poll()] == [sync(1, 9)]
    assert sum("the run's log failed" in record.message for record in caplog.records) == 1


def test_a_version_does_not_wait_for_a_slow_upload_of_the_log(bucket: Bucket) -> None:
    gate = threading.Event()
    begun = threading.Event()

    class Slow(RefusingBucket):
        def put(self, key: str, data: bytes) -> None:
            begun.set()
            gate.wait()
            self._bucket.put(key, data)

    slow: Any = Slow(bucket)
    log = RunLogWriter(slow, "r", FIRST, every_s=3600)
    log.append(step(1))
    thread = threading.Thread(target=log.flush)
    thread.start()
    begun.wait()
    with log.riding() as objects:
        assert not objects, "another thread stores them"
    gate.set()
    thread.join()
    log.close()
    assert steps(bucket) == [1]


def test_sync_events_hold_six_digits(bucket: Bucket) -> None:
    log = writer(bucket)
    exact = sync(1, 9).model_copy(update={"diff_s": 0.123456789, "t": 1_780_000_000.123456})
    log.append(exact)
    log.close()
    (event,) = RunLogReader(bucket, "r").poll()
    assert isinstance(event, SyncEvent)
    assert (event.diff_s, event.t) == (0.123457, 1_780_000_000.123)


@pytest.mark.parametrize(
    "name",
    [
        f"000000001.{'0' * 32}.00000000.jsonl.zst",
        f"00000001.{'0' * 32}.00000005-00000005.jsonl.zst",
        f"a/log/00000001.{'0' * 32}.00000000.jsonl.zst",
        f"00000001.{'0' * 32}.00000000-00099999.jsonl.zst",
    ],
    ids=["term of 9 digits", "segment of one flush", "nested", "segment of 100,000 flushes"],
)
def test_an_object_under_a_key_that_no_trainer_uses_stops_no_reader(bucket: Bucket, name: str) -> None:
    bucket.put(f"runs/r/log/{name}", b"?")
    log = writer(bucket)
    for number in range(3):
        log.append(step(number))
        ride(log, bucket)
    assert steps(bucket) == [0, 1, 2]
    log.complete(manifest_of(1, 0))
    log.close()
    assert steps(bucket) == [0, 1, 2]


def test_a_damaged_segment_hides_no_flush_that_is_left(bucket: Bucket) -> None:
    log = writer(bucket)
    reader = RunLogReader(bucket, "r")
    for number in range(9):
        log.append(step(number))
        ride(log, bucket)
        if number == 4:
            assert len([*reader.poll()]) == 5
    bucket.put(log._keys.log_part(LogKey(FIRST, 0, 7)), b"damaged")
    for _ in range(2):
        assert [event.t for event in reader.poll()] == [5, 6, 7, 8]
        reader._seen[FIRST] = 5, 0
    assert steps(bucket)[-1] == 8


def test_half_an_object_is_no_object_without_events(bucket: Bucket) -> None:
    log = writer(bucket)
    for number in range(2):
        log.append(step(number, prompt=random.Random(number).randbytes(4000).hex()))
        ride(log, bucket)
    key = log._keys.log_part(LogKey(FIRST, 0, 0))
    whole = bucket.get(key)
    bucket.put(key, whole[: len(whole) // 2])
    reader = RunLogReader(bucket, "r")
    assert [event.t for event in reader.poll()] == [1]
    assert reader.skipped == 1


def test_a_bomb_of_lines_is_not_read_line_by_line(bucket: Bucket) -> None:
    put_flush(bucket, "r", [b"{}"] * 2_000_000, writer=FIRST)
    reader = RunLogReader(bucket, "r")
    assert [*reader.poll()] == []
    assert reader.skipped == 1


def test_a_step_in_another_script_keeps_its_conversations(bucket: Bucket) -> None:
    """JSON's escapes would make six bytes of each of these characters, and more than an event may have."""
    log = writer(bucket)
    turns = (("語" * 1500, "界" * 1500),) * 10
    rollouts = tuple(Rollout(turns=turns, reward=1.0, sync=0) for _ in range(10))
    log.append(sync(0, 10**9))
    log.append(step(1, rollouts=rollouts))
    log.close()
    _, event = RunLogReader(bucket, "r").poll()
    assert isinstance(event, StepEvent)
    assert event.rollouts == rollouts


def test_a_step_with_too_long_conversations_keeps_its_reward(bucket: Bucket) -> None:
    log = writer(bucket)
    rollouts = tuple(Rollout(turns=(("🂡" * 600, "🂮" * 600),) * 16, reward=1.0, sync=0) for _ in range(16))
    log.append(sync(0, 10**9))
    log.append(step(1, rollouts=rollouts))
    log.close()
    _, event = RunLogReader(bucket, "r").poll()
    assert isinstance(event, StepEvent)
    assert (event.reward, event.metrics, event.rollouts) == (0.5, {"loss": 0.142857}, ())


@pytest.mark.full
def test_what_waits_for_a_store_that_refuses_the_log_is_bounded_and_the_newest(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    refusing: Any = RefusingBucket(bucket)
    log = RunLogWriter(refusing, "r", FIRST, every_s=3600)
    metrics = {f"metric/{number}": number / 7 for number in range(256)}
    rollouts = (Rollout(turns=(("x" * 4000, ""),) * 16, reward=1.0, sync=0),)
    log.append(sync(0, 10**9))
    with pytest.raises(BucketUnreachableError):
        ride(log, refusing)
    most = 0
    for number in range(5000):
        event = step(number, rollouts=rollouts).model_copy(update={"metrics": metrics})
        log.append(event)
        most = max(most, sum(map(len, log._lines)))
    assert most < 17 << 20
    assert "run log: dropped the oldest" in caplog.text
    refusing.refuses = False
    log.close()
    left = steps(bucket)
    assert left == list(range(5000 - len(left), 5000))
    assert len(left) > 1000


def test_a_store_that_refuses_to_delete_gets_each_segment_once(bucket: Bucket) -> None:
    class Keeping(RefusingBucket):
        def delete(self, keys: Any) -> None:
            raise BucketUnreachableError("nothing is deleted")

    keeping: Any = Keeping(bucket)
    keeping.refuses = False
    log = RunLogWriter(keeping, "r", FIRST, every_s=3600)
    for number in range(SEGMENT + 5):
        log.append(step(number))
        ride(log, bucket)
    with pytest.raises(BucketUnreachableError):
        log._compact()
    before = bucket.ledger.counts()["log"].sent
    log._compact()
    assert bucket.ledger.counts()["log"].sent == before
    log.close()
    assert steps(bucket) == list(range(SEGMENT + 5))
