"""However a store fails, a replica asks it about as often as one that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_weight_sync.errors import (
    AccessDeniedError,
    BucketMissingError,
    BucketUnreachableError,
    ObjectMissingError,
)
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.follower import Follower
from tests.cli.drifting import RUN, Drifting
from tests.vllm.quick_time import QuickTime, Restarted

pytestmark = pytest.mark.finding(13)
Fault = Callable[[str, str], None]
MINUTE, LOOKS = 60, 61


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Drifting]:
    run = Drifting(tmp_path / "bucket")
    yield run
    run.close()


@pytest.fixture
def time(run: Drifting, monkeypatch: pytest.MonkeyPatch) -> QuickTime:
    return QuickTime(open_bucket(run.url), monkeypatch)


@pytest.fixture
def follower(run: Drifting, time: QuickTime, tmp_path: Path) -> Follower:
    """It serves version 0, and looks once a second."""
    reader = RunReader(time, RUN)
    follower = Follower(reader, Restarted(), name="r", folder=tmp_path / "r", poll_s=1.0)
    time.pass_for(2, follower)
    assert follower.serving == run.newest
    return follower


def asked_in_a_minute(time: QuickTime, follower: Follower) -> int:
    before = time.asked.total()
    time.pass_for(MINUTE, follower)
    return time.asked.total() - before


def raises(error: Exception, *operations: str) -> Fault:
    def fault(operation: str, key: str) -> None:
        if not operations or operation in operations:
            raise error

    return fault


@pytest.mark.parametrize(
    "error", [BucketUnreachableError("503"), AccessDeniedError("403"), BucketMissingError("404")]
)
def test_a_store_that_refuses_everything(time, follower, error) -> None:
    time.fault = raises(error)
    assert asked_in_a_minute(time, follower) <= 7, "after 0, 1, 3, 7, 15 and 31 seconds"
    time.fault = lambda operation, key: None
    time.pass_for(64, follower)
    assert follower.report(0).status.error is None, "and it is found again"


@pytest.mark.parametrize("operation", ["get", "fetch"])
def test_a_store_that_tells_of_a_version_and_does_not_hand_it_over(run, time, follower, operation) -> None:
    time.fault = raises(BucketUnreachableError("503"), operation)
    run.step()
    assert asked_in_a_minute(time, follower) <= LOOKS + 7 * 8
    time.fault = lambda operation, key: None
    time.pass_for(64, follower)
    assert follower.serving == run.newest


def test_a_head_that_is_gone_or_damaged_while_nothing_is_new(run, time, follower) -> None:
    (head,) = (run.folder / "runs" / RUN / "heads").iterdir()
    head.write_bytes(b"damaged")
    assert asked_in_a_minute(time, follower) <= LOOKS + 10
    assert "is not a valid Head" in (follower.report(0).status.error or "")
    head.unlink()
    assert asked_in_a_minute(time, follower) <= 2 * LOOKS + 10, "it is looked for"
    assert follower.serving == run.newest


def test_all_records_are_damaged_and_thousands_are_added(run, time, follower) -> None:
    manifests = run.folder / "runs" / RUN / "manifests"
    for path in (*manifests.iterdir(), *(run.folder / "runs" / RUN / "heads").iterdir()):
        path.write_bytes(b"damaged")
    for version in range(5000):
        (manifests / f"{version:08d}.t9-00000000.json").write_bytes(b"{}")
    assert asked_in_a_minute(time, follower) <= LOOKS + 7 * 140, "64 of them at most, seven times"
    assert follower.serving == run.newest


def test_a_delta_that_is_gone(run, time, follower) -> None:
    (run.folder / run.step().deltas[-1].key).unlink()
    assert asked_in_a_minute(time, follower) <= LOOKS + 7 * 5
    assert time.fetched_of("/deltas/") <= 7


def test_a_store_that_hides_what_it_has_just_shown(run, time, follower) -> None:
    """Each second another answer."""
    run.step()

    def fault(operation: str, key: str) -> None:
        if operation in ("get", "fetch") and int(time.now) % 2:
            raise ObjectMissingError(f"{key} does not exist")

    time.fault = fault
    assert asked_in_a_minute(time, follower) <= LOOKS + 20
    assert follower.serving == run.newest
