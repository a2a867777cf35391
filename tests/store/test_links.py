"""A folder as a bucket: nothing behind a link or a pipe in it is ever an object."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from delta_weight_sync.errors import BucketError, ObjectMissingError
from delta_weight_sync.store import Bucket, open_bucket

pytestmark = pytest.mark.finding(2)
SECRET = b"HF_TOKEN=hf_planted"
KEY = "runs/r/deltas/00000001.t1-aaaaaaaa.safetensors"


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    bucket = open_bucket((tmp_path / "bucket").as_uri(), create=True)
    bucket.put("runs/r/sound", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "environ").write_bytes(SECRET)
    return bucket


def planted(tmp_path: Path, kind: str) -> str:
    """Put something at `KEY` that leads out of the bucket; returns the key of the secret behind it."""
    place, outside = tmp_path / "bucket" / KEY, tmp_path / "outside"
    if kind == "file":
        place.parent.mkdir(parents=True)
        place.symlink_to(outside / "environ")
        return KEY
    if kind == "folder":
        place.parent.mkdir(parents=True)
        place.symlink_to(outside)
    if kind == "parent":
        place.parent.symlink_to(outside)
        return f"{Path(KEY).parent}/environ"
    return f"{KEY}/environ"


KINDS = ("file", "folder", "parent")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_through_a_link(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    key = planted(tmp_path, kind)
    assert [info.key for info in bucket.list("")] == ["runs/r/sound"]
    assert bucket.list(f"{Path(key).parent}/") == []
    assert bucket.stat(key) is None
    for read in (bucket.get, lambda key: bucket.fetch(key, tmp_path / "copy", 1000)):
        with pytest.raises(ObjectMissingError, match="links are not followed"):
            read(key)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_or_deleted_through_a_link(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    key = planted(tmp_path, kind)
    if kind == "file":
        bucket.put(key, b"an object")  # takes the place of the link
        assert bucket.get(key) == b"an object"
        (tmp_path / "bucket" / key).unlink()
        (tmp_path / "bucket" / key).symlink_to(tmp_path / "outside" / "environ")
    else:
        with pytest.raises(BucketError, match="links are not followed"):
            bucket.put(key, b"an object")
    bucket.delete([key])
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["environ"]
    assert (tmp_path / "outside" / "environ").read_bytes() == SECRET


def test_a_pipe_does_not_block_a_reader(bucket: Bucket, tmp_path: Path) -> None:
    pipe = tmp_path / "bucket" / "runs" / "r" / "pipe"
    os.mkfifo(pipe)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            bucket.get("runs/r/pipe")
        except BucketError as error:
            ended.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(30)
    stuck = reading.is_alive()
    if stuck:
        os.close(os.open(pipe, os.O_WRONLY))  # so that nothing is left behind
        reading.join(30)
    assert not stuck
    assert isinstance(ended[0], ObjectMissingError)
    assert [info.key for info in bucket.list("")] == ["runs/r/sound"]


def test_the_bucket_itself_may_be_behind_a_link(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(tmp_path / "bucket")
    assert open_bucket((tmp_path / "mounted").as_uri()).get("runs/r/sound") == b"x"


def test_names_that_are_not_keys_are_not_listed(bucket: Bucket, tmp_path: Path) -> None:
    """Reading such a key is refused: one such name would hide every run. An upload that crashed has one."""
    for name in ("runs/q/.0a1b.part", "runs/a b/run.json", "runs/\x1b[2J/run.json", "runs/é/run.json"):
        path = tmp_path / "bucket" / name
        path.parent.mkdir()
        path.write_bytes(b"{}")
    assert [info.key for info in bucket.list("")] == ["runs/r/sound"]
