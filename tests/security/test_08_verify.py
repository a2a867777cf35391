"""Proving a version costs a whole model: once, however often it is asked, and so much in five minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.library import MAX_REBUILD, Library
from inference_space.dashboard.once import FAILED_S, Once
from inference_space.dashboard.rations import BYTES, CALLS, WINDOW_S, Rationed, RationedError
from tests.dashboard.real_run import RealRun
from tests.dashboard.test_formulas import manifest_of

VERSIONS = 70  # more than were once kept


class Counting:
    """A bucket that counts what is downloaded."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url, self.fetched = bucket, bucket.url, Counter[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._bucket, name)

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        self.fetched[key] += 1
        self._bucket.fetch(key, dest, limit)


@pytest.fixture
def bucket(tmp_path: Path) -> Counting:
    return Counting(open_bucket(tmp_path.as_uri(), create=True))


def test_versions_that_are_asked_for_in_turn_are_rebuilt_once(bucket: Counting) -> None:
    run = RealRun(bucket, run="r", layers=1, width=4)
    for _ in range(VERSIONS):
        run.step()
    run.close()
    library = Library(bucket, lambda: "r")
    said = [library.verify(version) for version in range(VERSIONS + 1)]
    once = bucket.fetched.total()
    assert [library.verify(version) for version in range(VERSIONS + 1)] == said
    assert bucket.fetched.total() == once


def test_a_version_that_is_damaged_is_not_fetched_again_and_again(bucket: Counting) -> None:
    run = RealRun(bucket, run="r", layers=1, width=4)
    run.step()
    run.close()
    delta = run.reader.at().deltas[-1]
    bucket.put(delta.key, b"?" * delta.size)
    bucket.fetched.clear()
    library = Library(bucket, lambda: "r")
    for _ in range(10):
        with pytest.raises(ProtocolError, match="is not the published object"):
            library.verify(1)
    assert bucket.fetched[delta.key] == 1


def test_a_failure_is_believed_for_a_while_only() -> None:
    now, calls = [0.0], list[str]()

    def fail(question: str) -> str:
        calls.append(question)
        raise ProtocolError("it is damaged")

    ask = Once(fail, 10, clock=lambda: now[0])
    for now[0] in (0.0, FAILED_S, FAILED_S + 1):
        with pytest.raises(ProtocolError):
            ask("x")
    assert len(calls) == 2


def test_answers_make_room_by_their_weight() -> None:
    worked, dropped = list[int](), list[int]()

    def work(question: int) -> int:
        worked.append(question)
        return question

    ask = Once(work, 10, weigh=lambda answer: answer, drop=dropped.append)
    for question in (4, 5, 4, 3, 4, 5, 100):
        assert ask(question) == question
    assert (worked, dropped) == ([4, 5, 3, 5, 100], [5, 3, 4, 5])


def test_what_a_manifest_says_of_its_size_is_not_believed(
    bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`full_bytes` is a number; the sizes of its files are what is fetched."""
    manifest = manifest_of(0, 0)
    file = manifest.anchor.files[0].model_copy(update={"size": MAX_REBUILD + 1})
    anchor = manifest.anchor.model_copy(update={"files": (file,)})
    forged = Manifest(**manifest.model_dump(exclude={"seal", "anchor"}) | {"anchor": anchor, "full_bytes": 2})
    monkeypatch.setattr(Library, "_manifest", lambda *_: forged)
    with pytest.raises(ProtocolError, match="too large to be rebuilt here"):
        Library(bucket, lambda: "r").verify(0)
    assert not bucket.fetched


def test_a_larger_object_than_named_is_not_fetched(bucket: Counting, tmp_path: Path) -> None:
    run = RealRun(bucket, run="r", layers=1, width=4)
    run.step()
    run.close()
    delta = run.reader.at().deltas[-1]
    bucket.put(delta.key, bytes(delta.size + 1))
    with pytest.raises(ProtocolError, match=f"at most {delta.size} are allowed: it was not read"):
        RunReader(bucket, "r").fetch(delta, tmp_path / "here")
    assert not (tmp_path / "here" / delta.name).exists()


def test_visitors_together_have_so_many_requests_and_bytes(bucket: Counting, tmp_path: Path) -> None:
    now = [0.0]
    bucket.put("runs/r/x", b"x")
    rationed = Rationed(bucket, lambda: now[0])
    for _ in range(CALLS):
        rationed.stat("runs/r/x")
    with pytest.raises(RationedError, match="try again in 1 s"):
        rationed.get("runs/r/x")
    now[0] += WINDOW_S / CALLS
    assert rationed.get("runs/r/x") == b"x"
    now[0] += WINDOW_S
    rationed.fetch("runs/r/x", tmp_path / "x", BYTES)
    with pytest.raises(RationedError, match=r"2 GB .* try again in 150 s"):
        rationed.fetch("runs/r/x", tmp_path / "x", BYTES // 2)
    assert bucket.fetched["runs/r/x"] == 1
