"""What a writer of a bucket may put there: links out of a folder, and objects of any size."""

import hashlib
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from delta_weight_sync.errors import BucketError, ObjectMissingError, ProtocolError
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest, Writer
from delta_weight_sync.store import SMALL, Bucket, open_bucket
from tests.support.real_run import RealRun

SECRET = b"HF_TOKEN=hf_planted"
DELTAS = "runs/r/deltas"
KEY = "runs/r/x"
GIB = 1 << 30
DELTA = f"{DELTAS}/00000001.t1-aaaaaaaa.safetensors"
KINDS = {  # the key that is a link, where the link leads, and the key of the secret behind it
    "file": (DELTA, "environ", DELTA),
    "folder": (DELTA, ".", f"{DELTA}/environ"),
    "parent": (DELTAS, ".", f"{DELTAS}/environ"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Bucket:
    folder = open_bucket((tmp_path / "bucket").as_uri(), create=True)
    folder.put("runs/r/sound", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "environ").write_bytes(SECRET)
    return folder


def planted(tmp_path: Path, kind: str) -> str:
    """Plant a link that leads out of the bucket; returns the key of the secret behind the link."""
    link, target, secret = KINDS[kind]
    place = tmp_path / "bucket" / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(tmp_path / "outside" / target)
    return secret


@pytest.mark.finding(2)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_through_a_link(folder: Bucket, tmp_path: Path, kind: str) -> None:
    key = planted(tmp_path, kind)
    assert [info.key for info in folder.list("")] == ["runs/r/sound"]
    assert folder.list(f"{Path(key).parent}/") == []
    assert folder.stat(key) is None
    for read in (folder.get, lambda key: folder.fetch(key, tmp_path / "copy", 1000)):
        with pytest.raises(ObjectMissingError, match="links are not followed"):
            read(key)
    assert not (tmp_path / "copy").exists()


@pytest.mark.finding(2)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_or_deleted_through_a_link(folder: Bucket, tmp_path: Path, kind: str) -> None:
    key = planted(tmp_path, kind)
    if kind == "file":
        folder.put(key, b"an object")  # takes the place of the link
        assert folder.get(key) == b"an object"
        (tmp_path / "bucket" / key).unlink()
        (tmp_path / "bucket" / key).symlink_to(tmp_path / "outside" / "environ")
    else:
        with pytest.raises(BucketError, match="links are not followed"):
            folder.put(key, b"an object")
    folder.delete([key])
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["environ"]
    assert (tmp_path / "outside" / "environ").read_bytes() == SECRET


@pytest.mark.finding(2)
def test_a_pipe_does_not_block_a_reader(folder: Bucket, tmp_path: Path) -> None:
    pipe = tmp_path / "bucket" / "runs" / "r" / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(folder.get, "runs/r/pipe")
        try:
            assert isinstance(reading.exception(30), ObjectMissingError)
        except TimeoutError:
            os.close(os.open(pipe, os.O_WRONLY))  # so that nothing is left behind
            raise
    assert [info.key for info in folder.list("")] == ["runs/r/sound"]


@pytest.mark.finding(2)
def test_names_that_are_not_keys_are_not_listed(folder: Bucket, tmp_path: Path) -> None:
    """Reading such a key is refused: one such name would hide every run. An upload that crashed has one.

    The bucket itself may be behind a link.
    """
    (tmp_path / "mounted").symlink_to(tmp_path / "bucket")
    assert open_bucket((tmp_path / "mounted").as_uri()).get("runs/r/sound") == b"x"
    for name in ("runs/q/.0a1b.part", "runs/a b/run.json", "runs/\x1b[2J/run.json", "runs/é/run.json"):
        path = tmp_path / "bucket" / name
        path.parent.mkdir()
        path.write_bytes(b"{}")
    assert [info.key for info in folder.list("")] == ["runs/r/sound"]


@pytest.mark.finding("N13")
def test_what_a_killed_upload_left_is_deleted_a_day_later(folder: Bucket, tmp_path: Path) -> None:
    names = [f".{number:032x}.part" for number in range(2)]
    for name in names:
        (tmp_path / "bucket/runs/r" / name).write_bytes(b"half of it")
    os.utime(tmp_path / "bucket/runs/r" / names[0], (0, time.time() - 90_000))
    folder.put("runs/r/old", b"")
    folder.delete(["runs/r/old"])
    assert sorted(path.name for path in (tmp_path / "bucket/runs/r").iterdir()) == [names[1], "sound"]


@pytest.mark.finding(12)
def test_an_object_is_read_up_to_its_limit(bucket: Bucket, tmp_path: Path) -> None:
    data = os.urandom(SMALL)
    bucket.put(KEY, data + b"x")
    with pytest.raises(ProtocolError, match=rf"{KEY} has {SMALL + 1} bytes, .* {SMALL} are allowed"):
        bucket.get(KEY)
    with pytest.raises(ProtocolError, match=rf"{KEY} has {SMALL + 1} bytes, but at most 4 are allowed"):
        bucket.fetch(KEY, tmp_path / "x", 4)
    assert not (tmp_path / "x").exists()
    assert bucket.fetch(KEY, tmp_path / "x", SMALL + 1) == hashlib.sha256(data + b"x").hexdigest()


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    run = RealRun(open_bucket((tmp_path / "bucket").as_uri(), create=True), run="r", layers=1, width=4)
    run.step()
    run.close()
    return run


def swell(tmp_path: Path, key: str, size: int = GIB) -> None:
    """Make an object larger; the file has no more pages than before."""
    os.truncate(tmp_path / "bucket" / key, size)


@pytest.mark.finding(12)
def test_a_swollen_head_is_read_around(run: RealRun, tmp_path: Path) -> None:
    reader = run.reader
    newest = reader.manifest()
    swell(tmp_path, reader.keys.head(reader.writers()[-1]))
    tracemalloc.start()
    found = RunReader(reader.bucket, "r").newest()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == newest
    assert peak < 4 << 20


@pytest.mark.finding(12)
@pytest.mark.parametrize("part", ["manifest", "head and manifest"])
def test_a_swollen_manifest_is_named(run: RealRun, tmp_path: Path, part: str) -> None:
    reader = run.reader
    newest = reader.manifest()
    writer = Writer(newest.writer_term, newest.writer)
    swell(tmp_path, reader.keys.manifest(newest.version, writer))
    if part != "manifest":
        swell(tmp_path, reader.keys.head(writer))
    assert RunReader(reader.bucket, "r").newest() == reader.read(Manifest, newest.parent)
    with pytest.raises(ProtocolError, match=f"has {GIB} bytes"):
        reader.require_intact()


@pytest.mark.finding(12)
def test_a_swollen_delta_is_not_fetched(run: RealRun, tmp_path: Path) -> None:
    delta = run.reader.manifest().deltas[-1]
    swell(tmp_path, delta.key)
    with pytest.raises(ProtocolError, match=f"at most {delta.size} are allowed"):
        run.reader.checkout(run.reader.manifest(), tmp_path / "out")
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 1 << 20


@pytest.mark.finding(12)
def test_a_term_after_which_none_comes_is_named(run: RealRun) -> None:
    """Its successor would write a record that no reader accepts."""
    last = Writer(10**18 - 1, "f" * 32)
    run.reader.bucket.put(run.reader.keys.head(last), b"{}")
    with pytest.raises(ProtocolError, match=f"delete heads/{last.term}.{last.id}.json of the run"):
        RunWriter(run.reader.bucket, "r", model="m", assets=None)


@pytest.mark.finding(12)
def test_numbers_of_hundreds_of_digits_are_no_part_of_a_run(run: RealRun) -> None:
    bucket = run.reader.bucket
    nines = "9" * 180
    for key in (f"heads/{nines}.{'f' * 32}.json", f"manifests/{nines}.t1-{'f' * 8}.json"):
        bucket.put(f"runs/r/{key}", b"{}")
    assert run.reader.manifest().version == 1
    writer = RunWriter(bucket, "r", model="m", assets=None)
    assert writer.writer.term == 2
