"""`follow`: the versions of a run in `for` and in `async for`, and what is left of it after any end."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync import BucketError, FolderError, KeyFormatError, follow, open_run
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from tests.support.real_run import Drifting


@pytest.fixture
def run(tmp_path: Path):
    run = Drifting(tmp_path / "bucket")
    yield run
    run.close()


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "policy"


def digest(folder: Path) -> str:
    return to_hex(state_digest(dict(read_bits(folder))))


def is_free(run: Drifting, into: Path) -> bool:
    return [version.version for version in follow(run.url, into, once=True)] == [run.newest.version]


def test_each_version_is_yielded_after_the_folder_holds_it_and_break_releases_the_folder(run, into):
    for version in follow(run.url, into, poll_s=0.01):
        assert (version.version, version.digest) == (run.newest.version, run.newest.digest)
        assert version.path == (into / "current").resolve()
        assert digest(version.path) == version.manifest.digest == run.newest.digest
        if version.version == 2:
            break
        run.step()
    assert is_free(run, into)


def test_the_same_iterator_works_in_async_for(run, into):
    async def consume() -> list[int]:
        seen = []
        async for version in follow(open_run(run.url), into, poll_s=0.01):
            seen.append(version.version)
            if len(seen) == 3:
                break
            run.step()
        return seen

    assert asyncio.run(consume()) == [0, 1, 2]
    assert is_free(run, into)


def test_a_cancelled_task_releases_the_folder(run, into):
    async def wait() -> None:
        async for _ in follow(run.url, into, poll_s=0.01):
            pass

    async def consume() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.5)

    asyncio.run(consume())  # waits for the thread
    assert is_free(run, into)


def test_one_version_can_be_pinned_and_close_ends_a_held_iterator(run, into):
    run.step()
    run.step()
    (pinned,) = follow(run.url, into, version=1)
    assert digest(into / "current") == pinned.digest == open_run(run.url).manifest(1).digest
    with follow(run.url, into, poll_s=0.01) as versions:
        assert next(versions).version == 2
        with pytest.raises(FolderError, match="another process"):
            next(follow(run.url, into))
        versions.close()
        assert list(versions) == []
    assert is_free(run, into)


def test_a_killed_consumer_leaves_a_whole_version_and_the_next_one_continues(run, into):
    script = (
        "import os, sys, delta_weight_sync as d\n"
        "for version in d.follow(sys.argv[1], sys.argv[2]): os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, run.url, str(into)])
    assert killed.returncode == -signal.SIGKILL
    assert digest(into / "current") == run.newest.digest
    built = (into / "current").stat().st_ino
    (version,) = follow(run.url, into, once=True)
    assert version.path.stat().st_ino == built, "it is not built again"


def test_errors_of_a_single_version_are_raised_and_a_wrong_key_too(into, tmp_path):
    with pytest.raises(BucketError):
        next(follow(f"{(tmp_path / 'nothing').as_uri()}#run", into, once=True))
    with pytest.raises(KeyFormatError, match="is neither a key"):
        next(follow("file:///x#run", into, public_key="ed25519_secret_1"))
