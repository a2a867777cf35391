"""What every bucket promises, whatever store is behind it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.errors import BucketError, BucketMissingError, ObjectMissingError
from delta_weight_sync.store import DIRECT, Bucket, open_bucket
from tests.support.buckets import KEY, every_operation

WRITER = """
import sys
from delta_weight_sync.store import open_bucket
bucket = open_bucket(sys.argv[1])
for _ in range(8):
    bucket.put("HEAD", sys.argv[2].encode() * 100_000)
"""


def keys(bucket: Bucket, prefix: str) -> list[str]:
    return [info.key for info in bucket.list(prefix)]


@pytest.mark.parametrize("size", [0, 1, 1000, 8 << 20], ids=["empty", "one byte", "small", "8 MB"])
def test_bytes_come_back_as_they_were_put(bucket: Bucket, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    with pytest.raises(FileNotFoundError):
        bucket.put(KEY, tmp_path / "model")
    assert bucket.list("") == []
    (tmp_path / "model").write_bytes(data)
    for source in (data, tmp_path / "model"):
        bucket.put(KEY, source)
        copy = tmp_path / "new" / "folder" / "copy"
        assert bucket.fetch(KEY, copy, size) == hashlib.sha256(data).hexdigest()
        assert bucket.get(KEY) == data
        assert copy.read_bytes() == data
        bucket.delete([KEY])


def test_an_object_is_replaced_for_readers_that_are_open_already(bucket: Bucket, bucket_url: str) -> None:
    reader = open_bucket(bucket_url)
    assert reader.stat(KEY) is None
    assert reader.list("") == []
    for data in (b"version 1", b"version 2", b"a much longer version 3"):
        bucket.put(KEY, data)
        info = reader.stat(KEY)
        assert reader.get(KEY) == data
        assert (info.key, info.size) == (KEY, len(data))
        assert reader.list("runs/") == [info]
    assert open_bucket(bucket_url, create=True).get(KEY) == data


def test_what_others_uploaded_is_stored_with_the_rest(bucket: Bucket, bucket_url: str) -> None:
    """As the parts of a version by several ranks; on the Hub they are no objects before that."""
    parts = {f"runs/part-{n}": os.urandom(1000) for n in range(3)}
    receipts = {key: open_bucket(bucket_url).upload(key, data) for key, data in parts.items()}
    if bucket_url.startswith("hf://"):
        assert keys(bucket, "") == []
    records = {"runs/manifest": b"manifest", "runs/head": b"head"}
    bucket.put_all([*records.items()], receipts)
    assert {key: bucket.get(key) for key in keys(bucket, "")} == parts | records
    bucket.put_all([], {"runs/late": receipt} if (receipt := bucket.upload("runs/late", b"late")) else {})
    assert bucket.get("runs/late") == b"late"


def test_the_etag_changes_with_the_content(bucket: Bucket) -> None:
    etags = []
    for version in range(20):  # faster than a file system's clock, and some are never looked at
        bucket.put(KEY, b"skipped %02d" % version)
        bucket.put(KEY, b"version %02d" % version)
        etags.append(bucket.stat(KEY).etag)
    assert len(set(etags)) == 20
    assert bucket.stat(KEY).etag == etags[-1]


def test_a_folder_is_listed_with_what_is_below_it_and_nothing_else(bucket: Bucket) -> None:
    stored = ["runs/a/HEAD", "runs/a/deltas/1", "runs/a/deltas/2", "runs/ab/HEAD", "runs/a.json", "top"]
    for key in stored:
        bucket.put(key, key.encode())
    assert keys(bucket, "") == sorted(stored)
    assert keys(bucket, "runs/a/") == ["runs/a/HEAD", "runs/a/deltas/1", "runs/a/deltas/2"]
    assert keys(bucket, "runs/none/") == []
    assert keys(bucket, "top/") == []
    assert bucket.stat("runs/a") is None, "a folder is no object"
    with pytest.raises(BucketError, match="must be empty or end with '/'"):
        bucket.list("runs/a")


def test_a_listing_has_times_and_missing_objects_can_be_deleted(bucket: Bucket) -> None:
    for key in ("runs/b", "runs/a", "runs/c"):
        bucket.put(key, b"x")
    written = {info.key: info.written for info in bucket.list("")}
    assert 1.5e9 < written["runs/b"] <= written["runs/a"] <= written["runs/c"]
    bucket.delete(["runs/a", "runs/never", "runs/c"])
    bucket.delete([])
    bucket.put_all([])
    assert keys(bucket, "") == ["runs/b"]
    assert bucket.stat("runs/a") is None


def test_two_prefixes_of_one_bucket_do_not_see_each_other(bucket: Bucket, bucket_url: str) -> None:
    other = open_bucket(f"{bucket_url}/inner", create=True)
    other.put("HEAD", b"inner")
    bucket.put("HEAD", b"outer")
    assert other.get("HEAD") == b"inner"
    assert keys(other, "") == ["HEAD"]
    assert keys(bucket, "") == ["HEAD", "inner/HEAD"]


def test_a_missing_object_is_named_and_a_failed_fetch_leaves_the_old_file_and_no_other(
    bucket: Bucket, bucket_url: str, tmp_path: Path
) -> None:
    dest = tmp_path / "live" / "model"
    dest.parent.mkdir()
    dest.write_bytes(b"old weights")
    for read in (bucket.get, lambda key: bucket.fetch(key, dest, 9)):
        with pytest.raises(ObjectMissingError, match=f"{bucket_url}/{KEY} does not exist"):
            read(KEY)
    assert dest.read_bytes() == b"old weights"
    assert list(dest.parent.iterdir()) == [dest]


def test_a_local_file_that_cannot_be_used_is_no_fault_of_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(KEY, b"weights")
    (tmp_path / "file").touch()
    for source in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=str(source)):
            bucket.put(KEY, source)
    for limit in (9, DIRECT + 1):
        with pytest.raises(OSError, match=str(tmp_path / "file")):
            bucket.fetch(KEY, tmp_path / "file" / "weights", limit)
    assert bucket.get(KEY) == b"weights"


@every_operation
def test_a_missing_bucket_is_told_from_a_missing_object(
    empty_url: str, operate: Callable[[Bucket], object]
) -> None:
    with pytest.raises(BucketMissingError, match=f"{empty_url} does not exist.*create"):
        operate(open_bucket(empty_url))


def test_readers_never_see_half_an_object_while_two_processes_write(bucket: Bucket, bucket_url: str) -> None:
    bucket.put("HEAD", b"0" * 100_000)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, bucket_url, digit]) for digit in "12"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        data = bucket.get("HEAD")
        assert len(data) == 100_000
        seen |= set(data.decode())
        assert len(set(data)) == 1
    assert [writer.wait() for writer in writers] == [0, 0]
    assert bucket.get("HEAD")[:1] in (b"1", b"2")
    assert keys(bucket, "") == ["HEAD"]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a/.b", "a\\b", "a b", "a\n", "ä", "a" * 513]
)
def test_keys_that_some_store_cannot_hold_are_refused(tmp_path: Path, key: str) -> None:
    bucket = open_bucket(f"file://{tmp_path}")
    writes = (lambda key: bucket.put(key, b""), lambda key: bucket.delete([key]))
    for operate in (bucket.get, bucket.stat, *writes):
        with pytest.raises(BucketError, match="cannot be a key"):
            operate(key)


@pytest.mark.parametrize(
    "url",
    ["runs/here", "/runs/here", "file://runs/here", "https://x", "s3://", "hf://team/x", "hf://buckets/x"],
)
def test_a_url_that_names_no_bucket_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(BucketError, match=r"write (hf|s3)://") as caught:
        open_bucket(url)
    assert repr(url) in str(caught.value)
