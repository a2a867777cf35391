"""Who joins or goes on from a signed run believes its key alone; in every store."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from delta_weight_sync.checkout import CheckpointFolder, updates
from delta_weight_sync.errors import SignatureError
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Writer
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys, fingerprint, new_pair
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import reaches, soon
from tests.support.real_run import RealRun
from tests.vllm.thief import (
    NEWEST,
    OURS,
    PAIR,
    THEIRS,
    Thief,
    following,
    goes_on,
    refuses,
    signed_run,
)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_anchor_that_is_swapped_is_not_joined(
    bucket: Bucket, run: RealRun, thief: Thief, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    (ref,) = (file for file in run.reader.manifest().anchor.files if file.name == name)
    published = bucket.get(ref.key)
    bucket.put(ref.key, published[:-1] + bytes([published[-1] ^ 1]))
    follower = following(bucket, tmp_path / "late")
    try:
        soon(lambda: ref.key in (follower.report(0).status.error or ""), f"{follower.report(0).status}")
        assert follower.serving is None
        bucket.put(ref.key, published)
        reaches(follower, NEWEST)
    finally:
        follower.stop()


def test_the_next_trainer_goes_on_from_what_was_signed(
    bucket: Bucket, run: RealRun, thief: Thief, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(99, "e" * 32)
    thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))
    next_one = RunWriter(bucket, "signed", model="m", assets=None)
    assert next_one.newest == run.reader.manifest()
    assert next_one.newest.version == NEWEST
    assert next_one.writer > writer
    assert [info.key for info in bucket.list(thief.keys.heads)] == [thief.keys.head(next_one.writer)]


def test_a_trainer_does_not_go_on_from_a_run_that_its_key_did_not_sign(
    bucket: Bucket, run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    with pytest.raises(SignatureError, match=r"was not signed by .*or start another run"):
        RunWriter(bucket, "signed", model="m", assets=None)


def test_a_trainer_with_a_new_key_goes_on_where_both_are_believed(
    bucket: Bucket, run: RealRun, follower: Follower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner changes keys; a reader that still believes the old one alone is left behind, and says so."""
    new = new_pair()
    both = f"{new[PUBLIC_KEY]},{PAIR[PUBLIC_KEY]}"
    monkeypatch.setenv(SIGNING_KEY, new[SIGNING_KEY])
    monkeypatch.setenv(PUBLIC_KEY, both)
    assets = tmp_path / "assets"
    assets.mkdir()
    writer = RunWriter(bucket, "signed", model="m", assets=assets)
    delta = bucket.get(run.reader.manifest().deltas[-1].key)
    made = writer.commit(
        writer.put_delta(NEWEST + 1, delta, 1), None, digest="0" * 16, sync=9, total=1, created_at=0.0
    )
    assert RunReader(bucket, "signed", PublicKeys(both)).signer(made) == fingerprint(new[PUBLIC_KEY])
    assert len(list(RunReader(bucket, "signed", PublicKeys(both)).versions())) == NEWEST + 2
    refuses(follower, thief_name(writer), OURS)


def thief_name(writer: RunWriter) -> str:
    return writer.keys.head(writer.writer)


def test_a_reader_with_the_wrong_key_says_so_and_does_not_read_the_whole_run(bucket: Bucket) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, word in PAIR.items():
            patch.setenv(name, word)
        run = RealRun(bucket, run="signed", layers=1)
        for _ in range(40):
            run.step()
        run.close()
    counted = CountedBucket(bucket)
    with pytest.raises(SignatureError, match=r"heads/.* was not signed by"):
        RunReader(counted, "signed", PublicKeys(new_pair()[PUBLIC_KEY])).manifest()
    assert counted.asked["get"] < 40
    assert RunReader(bucket, "signed", PublicKeys("")).manifest().version == 40, (
        "without a key nothing is checked"
    )


def test_in_every_store(bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    bucket = open_bucket(bucket_url)
    thief, writer = Thief(bucket), Writer(99, "e" * 32)
    with signed_run(bucket, thief, monkeypatch) as run, contextlib.ExitStack() as stack:
        follower = following(bucket, tmp_path / "r")
        stack.callback(follower.stop)
        reaches(follower, NEWEST)
        head = thief.head
        thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))
        refuses(follower, thief.keys.head(writer), OURS)
        thief.bucket.put(head, thief.then(1, head))
        refuses(follower, head, f"went back from version {NEWEST} to 1")
        goes_on(follower, run)


def test_a_followed_folder_reports_what_it_skips(
    bucket: Bucket, run: RealRun, thief: Thief, tmp_path: Path
) -> None:
    writer = Writer(99, "e" * 32)
    thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))
    reader = RunReader(bucket, "signed", PublicKeys(PAIR[PUBLIC_KEY]))

    def complain(error: Exception) -> None:
        raise InterruptedError(str(error))  # ends the watch

    with CheckpointFolder(reader, tmp_path / "folder") as folder:
        versions = updates(reader, folder, complain)
        assert next(versions).version == NEWEST
        with pytest.raises(InterruptedError, match=f"{thief.keys.head(writer)} was not signed by {OURS}"):
            next(versions)


def test_a_follower_that_starts_now_cannot_tell_that_a_version_is_old(
    bucket: Bucket, run: RealRun, thief: Thief, tmp_path: Path
) -> None:
    """SECURITY.md: a signature has no date, so an old HEAD of this run is believed."""
    thief.bucket.put(thief.head, thief.then(1, thief.head))
    follower = following(bucket, tmp_path / "new")
    try:
        reaches(follower, 1)
        assert follower.report(0).status.signed_by == OURS
        goes_on(follower, run)
    finally:
        follower.stop()
