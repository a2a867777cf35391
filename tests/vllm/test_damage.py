"""Objects that are damaged or gone: a replica serves on, says what is wrong, and comes back by itself.

vLLM is stood in for: a damaged object never wait_until_serving it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from delta_weight_sync.errors import BucketUnreachableError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import FileRef, Manifest
from delta_weight_sync.store import Bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import soon, wait_until_serving
from tests.support.real_run import RealRun
from tests.support.written_run import file_ref

Damage = Callable[[Bucket, FileRef], None]


def gone(bucket: Bucket, file: FileRef) -> None:
    bucket.delete([file.key])


def corrupt(bucket: Bucket, file: FileRef) -> None:
    data = bucket.get(file.key)
    bucket.put(file.key, data[:-1] + bytes([data[-1] ^ 1]))


both = pytest.mark.parametrize("damage", [gone, corrupt])


class Published(RealRun):
    """Nobody but the replica reads it."""

    def _take(self, manifest: Manifest) -> None:
        pass


@pytest.fixture
def run(bucket: Bucket) -> Iterator[RealRun]:
    """At version 2, all deltas on the first anchor."""
    run = Published(bucket, run="hurt", layers=1)
    run.step()
    run.step()
    yield run
    run.close()


def anchored(run: RealRun) -> Manifest:
    """A version that comes with an anchor: the deltas since the last one are as large as the model."""
    before = run.reader.manifest().anchor
    run.rate = 1.0
    while (newest := run.step()).anchor == before:
        run.settle()
    run.rate = 1e-5
    return newest


def says(follower: Follower, what: str) -> None:
    soon(lambda: what in (follower.report(0).status.error or ""), lambda: f"{what}: {follower.report(0)}")


def is_well(follower: Follower) -> None:
    soon(lambda: follower.report(0).status.error is None, "all is well again")


def damage_next_delta(run: RealRun, bucket: Bucket, damage: Damage) -> Manifest:
    """Publish a version whose delta is damaged before any replica can know of it."""
    store = run.outbox._writer.bucket

    def put_all(objects: list[tuple[str, bytes]], _: object) -> None:
        for key, data in objects:
            store.put(key, data)
            if "/deltas/" in key:
                damage(bucket, file_ref(key, data))

    with mock.patch.object(store, "put_all", put_all):
        return run.step()


@both
def test_a_damaged_delta_is_named_and_the_next_anchor_makes_up_for_it(run, bucket, follower, vllm, damage):
    follower.start()
    wait_until_serving(follower, 2)
    says(follower, damage_next_delta(run, bucket, damage).deltas[-1].key)
    assert follower.report(0).status.version == 2
    assert follower.report(0).status.state == "serving"
    newest = anchored(run)
    wait_until_serving(follower, newest.version)
    is_well(follower)
    assert (vllm.digest(), vllm.starts) == (newest.digest, 1)


@both
def test_a_replica_joins_at_the_newest_version_that_is_whole(run, bucket, follower, vllm, damage) -> None:
    damage(bucket, run.reader.manifest(2).deltas[-1])
    follower.start()
    wait_until_serving(follower, 1)
    says(follower, run.reader.manifest(2).deltas[-1].key)
    assert vllm.digest() == run.reader.manifest(1).digest
    newest = anchored(run)
    wait_until_serving(follower, newest.version)
    assert (vllm.digest(), vllm.starts) == (newest.digest, 1)


@both
def test_a_replica_joins_by_the_anchor_before_a_damaged_one(run, bucket, follower, vllm, damage, caplog):
    """And goes on by deltas, which need no anchor."""
    newest = anchored(run)
    damage(bucket, newest.anchor.files[0])
    before = next(older for older in run.reader.versions() if older.anchor != newest.anchor)
    follower.start()
    wait_until_serving(follower, newest.version)
    assert vllm.digest() == newest.digest
    commits = [(commit.version, commit.joined) for commit in follower.report(-1).commits]
    assert commits == [(before.version, True), (newest.version, False)]
    assert newest.anchor.files[0].key in caplog.text


@both
def test_a_trainer_that_goes_on_makes_up_for_a_damaged_file(run, bucket, damage, monkeypatch) -> None:
    """It looks at what its newest version needs now and then; a file that is written over looks different."""
    monkeypatch.setattr("delta_weight_sync.publish.writer._EVERY", 4)
    monkeypatch.setattr("delta_weight_sync.records.ANCHOR_PAYS", 1000.0)
    run.steps(5 - run.version)  # by then it has seen every file of version 4
    first = run.reader.manifest().deltas[0]
    damage(bucket, first)
    run.steps(10 - run.version)
    assert run.newest.anchor.version == 9, "after it looked again"
    assert first not in run.newest.recipe().files


@both
def test_it_tries_again_where_the_new_anchor_could_not_be_stored(run, bucket, damage, monkeypatch) -> None:
    monkeypatch.setattr("delta_weight_sync.publish.writer._EVERY", 4)
    run.steps(5 - run.version)
    config = run.reader.manifest().anchor.files[-1]
    writer = run.outbox._writer
    refused = [1]
    put = writer.bucket.put

    def put_later(key: str, data: bytes | Path) -> None:
        if "/anchors/" in key and refused:
            refused.pop()
            raise BucketUnreachableError(f"{key}: the link is down")
        put(key, data)

    damage(bucket, config)
    monkeypatch.setattr(writer.bucket, "put", put_later)
    run.steps(11 - run.version)
    assert not refused
    assert config not in run.newest.recipe().files


@pytest.mark.parametrize("has_base", [True, False])
def test_it_finds_damage_that_is_older_than_its_first_look(run, bucket, monkeypatch, has_base) -> None:
    """Without the base model's files it would store anchor after anchor, and mend nothing."""
    monkeypatch.setattr("delta_weight_sync.publish.writer._EVERY", 4)
    monkeypatch.setattr("delta_weight_sync.records.ANCHOR_PAYS", 1000.0)
    config = run.reader.manifest().anchor.files[-1]
    writer = run.outbox._writer
    writer.assets = writer.assets if has_base else None
    corrupt(bucket, config)
    run.steps(8 - run.version)
    assert (config not in run.newest.recipe().files) == has_base
    assert run.newest.anchor.version == 5 * has_base, "one anchor, and no second one for the same damage"


def test_a_kept_anchor_that_is_damaged_starts_no_vllm_with_it(run, bucket, follower, vllm, tmp_path) -> None:
    follower.start()
    wait_until_serving(follower, 2)
    follower.stop()
    (kept,) = (tmp_path / "r" / "anchors").glob("*/model.safetensors")
    damaged = kept.read_bytes()[:-1] + b"?"
    kept.write_bytes(damaged)
    again = Follower(RunReader(bucket, "hurt"), vllm, name="r", folder=tmp_path / "r", poll_s=0.01)
    again.start()
    wait_until_serving(again, 2)
    assert vllm.starts == 2, "one for each follower"
    assert kept.read_bytes() != damaged
    compared = vllm.compared
    kept.write_bytes(b"damaged while it is used")
    again.commands.heal()
    soon(lambda: vllm.compared == compared + 1, "a comparison with the published weights")
    wait_until_serving(again, 2)
    is_well(again)
    again.stop()
    assert vllm.starts == 2, "healed in place"


def test_a_disk_that_is_full_is_named_and_what_is_served_stays(run, follower, vllm, monkeypatch) -> None:
    follower.start()
    wait_until_serving(follower, 2)
    compared = vllm.compared

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("delta_weight_sync.vllm.disk.shutil.copytree", full)
        follower.commands.heal()
        says(follower, "No space left on device")
        assert follower.report(0).status.version == 2
    newest = run.step()
    wait_until_serving(follower, newest.version)
    is_well(follower)
    assert (vllm.starts, vllm.compared) == (1, compared + 1), "healing was not forgotten"
