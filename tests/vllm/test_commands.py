"""What the owner orders is what the replica does: pause, resume, pin, join again; also when vLLM dies.

vLLM is stood in for, as here it has to die at a given moment; tests/live/test_replica.py orders a real one.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.reader import RunReader
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import InMemoryVllm, soon, wait_until_serving
from tests.support.real_run import RealRun
from tests.support.written_run import WrittenRun


@pytest.fixture
def run(bucket: CountedBucket) -> Iterator[RealRun]:
    """At version 3."""
    run = RealRun(bucket.bucket, run="ordered", layers=1)
    for _ in range(3):
        run.step()
    yield run
    run.close()


@pytest.fixture
def follower(follower: Follower, caplog: pytest.LogCaptureFixture) -> Follower:
    """It serves version 3."""
    caplog.set_level("INFO", "delta_weight_sync")
    follower.start()
    wait_until_serving(follower, 3)
    return follower


def stays(follower: Follower, vllm: InMemoryVllm, version: int) -> None:
    """It still serves `version` after it has looked around a few times."""
    before = vllm.asked
    soon(lambda: vllm.asked > before + 5, "more turns")
    assert follower.serving
    assert follower.serving.version == version


def test_paused_it_stays_and_resumed_it_catches_up_without_a_restart(follower, run, vllm, bucket) -> None:
    """By jumps. A later version that is pinned is reached by its deltas, too."""
    follower.commands.pause()
    run.steps(22)
    stays(follower, vllm, 3)
    follower.commands.pin(4)
    wait_until_serving(follower, 4)
    assert vllm.digest() == run.reader.manifest(4).digest
    bucket.fetched.clear()
    follower.commands.resume()
    wait_until_serving(follower, 25)
    assert (vllm.digest(), vllm.starts, vllm.compared) == (run.reader.manifest(25).digest, 1, 1)
    assert Counter(key.split("/")[2] for key in bucket.fetched) == {"jumps": 2, "deltas": 5}


def test_a_replica_whose_files_are_deleted_under_it_heals_in_place(follower, run, vllm, bucket, monkeypatch):
    """It has read a manifest; before it fetches, much is published, and what it was to fetch is deleted."""
    monkeypatch.setattr("delta_weight_sync.records.recipes.WINDOW", 2)
    fetch = bucket.fetch

    def too_late(*arguments: Any) -> str:
        bucket.fetch = fetch
        run.steps(12)
        prune(bucket.bucket, Pruner(run.reader, Keep(size=1.0), grace_s=0.0).survey())
        return fetch(*arguments)

    follower.commands.pause()
    run.step()
    bucket.fetch = too_late
    follower.commands.resume()
    wait_until_serving(follower, 16)
    assert (vllm.digest(), vllm.starts) == (run.newest.digest, 1)
    soon(lambda: follower.report(0).status.error is None, "no error")


def test_a_pinned_version_is_served_exactly_whatever_comes(follower, run, vllm) -> None:
    follower.commands.pin(1)
    wait_until_serving(follower, 1)
    run.step()
    stays(follower, vllm, 1)
    assert vllm.digest() == run.reader.manifest(1).digest
    assert vllm.compared == 2, "back by comparing"
    follower.commands.heal()
    soon(lambda: vllm.compared == 3, "another comparison")
    stays(follower, vllm, 1)
    follower.commands.resume()
    wait_until_serving(follower, 4)
    assert (vllm.digest(), vllm.starts) == (run.reader.manifest(4).digest, 1)
    assert vllm.compared == 3, "on by deltas"


def test_what_holds_a_replica_back_is_in_its_status(follower: Follower) -> None:
    notices = []
    for order in (follower.commands.pause, lambda: follower.commands.pin(1), follower.commands.resume):
        order()
        notices.append(follower.report(0).notice)
    wait = "newer versions wait until you resume this replica"
    assert notices == [f"paused: {wait}", f"pinned to version 1: {wait}", "polls every 0.01 s"]


def test_a_run_that_vanishes_and_returns_leaves_no_replica_stuck(follower, bucket, tmp_path, caplog) -> None:
    """The folder of the run was moved away for a moment; no new version comes."""
    runs = Path(bucket.url.removeprefix("file://")) / "runs"
    away = tmp_path / "away"
    runs.rename(away)
    soon(lambda: "is gone from" in (follower.report(0).status.error or ""), "the error")
    assert (follower.report(0).status.state, follower.report(0).status.version) == ("serving", 3)
    away.rename(runs)
    soon(lambda: follower.report(0).status.error is None, "serving again")
    assert follower.report(0).status.state == "serving"
    assert caplog.text.count("is gone from") == 1


def test_each_state_is_one_line_of_the_log(follower, run, bucket, caplog) -> None:
    """Of versions that follow each other, one line a minute."""
    for _ in range(3):
        wait_until_serving(follower, run.step().version)
    lines = [
        record.message.removeprefix("replica r: ")
        for record in (*caplog.get_records("setup"), *caplog.records)
    ]
    first = run.reader.manifest(3)
    assert lines == [
        f"follows {bucket.url}#ordered",
        "fetching version 3",
        "starting vLLM with version 3",
        f"serves version 3, digest {first.digest}",
    ]


def test_damaged_weights_are_healed_without_a_restart(
    follower: Follower, run: RealRun, vllm: InMemoryVllm
) -> None:
    vllm.bits["model.embed_tokens.weight"][0, 0] ^= 1
    follower.commands.heal()
    soon(lambda: vllm.compared == 2, "a comparison with the published weights")
    wait_until_serving(follower, 3)
    stays(follower, vllm, 3)
    assert vllm.digest() == run.reader.manifest(3).digest
    assert (vllm.starts, vllm.compared) == (1, 2), "once is enough"


def test_weights_that_a_delta_does_not_fit_are_healed_by_the_next_version(follower, run, vllm) -> None:
    vllm.bits["model.embed_tokens.weight"][0, 0] ^= 1
    run.step()
    wait_until_serving(follower, 4)
    assert (vllm.digest(), vllm.starts) == (run.reader.manifest(4).digest, 1)


def test_a_vllm_that_dies_while_paused_comes_back_at_its_version(follower, run, vllm) -> None:
    follower.commands.pause()
    run.step()
    vllm.kill()
    soon(lambda: vllm.starts == 2, "a second start")
    wait_until_serving(follower, 3)
    stays(follower, vllm, 3)
    assert vllm.digest() == run.reader.manifest(3).digest


def test_a_pinned_version_whose_files_are_gone_leaves_what_is_served(follower, run, vllm, bucket) -> None:
    delta = run.reader.manifest(1).deltas[0].key
    kept = bucket.get(delta)
    bucket.delete([delta])
    follower.commands.pin(1)
    soon(lambda: delta in (follower.report(0).status.error or ""), "an error that names the file")
    assert follower.serving
    assert follower.serving.version == 3
    follower.commands.resume()
    soon(lambda: follower.report(0).status.error is None, "no error")
    assert vllm.starts == 1
    bucket.put(delta, kept)
    follower.commands.pin(1)
    wait_until_serving(follower, 1)


@pytest.mark.parametrize("version", [4, 99999999, 10**12])
def test_a_version_that_is_not_there_is_a_sentence(follower: Follower, version: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"run 'ordered' has no version {version}; its newest is version 3"
    ):
        follower.commands.pin(version)
    assert follower.commands.pinned is None


def test_a_run_that_is_started_over_is_followed_in_place(run, bucket, follower, vllm, request) -> None:
    run.close()
    bucket.delete([info.key for info in bucket.list("runs/ordered/")])
    again = RealRun(bucket, run="ordered", layers=1)
    request.addfinalizer(again.close)
    wait_until_serving(follower, 0)
    again.step()
    wait_until_serving(follower, 1)
    assert follower.report(0).status.digest == vllm.digest() == RunReader(bucket, "ordered").manifest().digest
    assert vllm.starts == 1


def test_an_old_version_of_a_long_run_is_found_by_one_listing(bucket: CountedBucket, tmp_path: Path) -> None:
    run = WrittenRun(bucket.bucket, "long")
    for _ in range(200):
        run.publish(40_000, 2_000)
    run.log.close()
    follower = Follower(RunReader(bucket, "long"), InMemoryVllm(), name="r", folder=tmp_path, poll_s=0.01)
    follower.commands.pin(2)
    assert follower.commands.pinned == RunReader(bucket.bucket, "long").manifest(2)
    assert bucket.asked["list"] == 2, "HEADs and manifests"
    assert bucket.asked["get"] == 3, "HEAD, the manifest that it names, and this one"
