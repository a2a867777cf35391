"""Failures are retried with growing pauses, complete files are not fetched again, nothing goes back.

A damaged file of 1 kB had all weights fetched each three seconds, a HEAD that flips had vLLM started each
time, and one stale read brought an old version back.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from delta_weight_sync import errors
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Keys, Writer, reference
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.store.notifications import Notifications
from delta_weight_sync.vllm.follower import Follower
from tests.cli.command import Result, command
from tests.support.fake_vllm import InMemoryVllm
from tests.support.real_run import RUN, Drifting
from tests.support.waiting import soon
from tests.support.written_run import file_ref
from tests.vllm.test_signed import renewed

pytestmark = pytest.mark.finding(13)

TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
IN_31_S = 6  # tries: after 0, 1, 3, 7, 15 and 31 seconds; there were eleven
IN_AN_HOUR = 15


class QuickTime:
    """A bucket whose readers do not wait; it counts requests, `fault` may raise, pauses call `in_pauses`."""

    def __init__(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bucket = bucket
        self.url = bucket.url
        self.now = self._end = 0.0
        self._follower: Follower | None = None
        self.asked = Counter[str]()
        self.fetched = list[str]()
        self.in_pauses: Callable[[], object] = lambda: None
        self.fault: Callable[[str, str], object] = lambda operation, key: None
        monkeypatch.setattr("delta_weight_sync.watch.monotonic", lambda: self.now)
        monkeypatch.setattr("delta_weight_sync.reader.open_bucket", lambda url: self)

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._bucket, name)

        def ask(key: str, *others: Any) -> Any:
            self.asked[name] += 1
            if name == "fetch":
                self.fetched.append(key)
            self.fault(name, key)
            return work(key, *others)

        return ask

    def notifications(self, prefix: str) -> Notifications:
        return _QuickNotifications(self)

    def fetched_of(self, part: str) -> int:
        """How often what has `part` in its key was fetched."""
        return sum(part in key for key in self.fetched)

    def pass_for(self, seconds: float, follower: Follower) -> None:
        """The replica follows for so long."""
        self._end = self.now + seconds
        self._follower = follower
        follower._stopped.clear()
        follower._run()

    def follow(self, seconds: float, run: str, folder: Path, *words: str) -> Result:
        """`delta-weight-sync follow`, and Ctrl-C after so long."""
        self._end = self.now + seconds
        self._follower = None
        return command("follow", self.url, "--run", run, "--into", folder, *words)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.in_pauses()
        if self.now >= self._end and self._follower is None:
            raise KeyboardInterrupt
        if self.now >= self._end and self._follower:
            self._follower._stopped.set()


class _QuickNotifications(Notifications):
    def __init__(self, time: QuickTime) -> None:
        super().__init__(clock=lambda: time.now)
        self._time = time

    def wait(self, seconds: float) -> None:
        self._time.passes(seconds)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Drifting]:
    """At version 0, with a tokenizer."""
    run = Drifting(tmp_path / "bucket", files={TOKENIZER: "{}"})
    yield run
    run.close()


@pytest.fixture
def time(run: Drifting, monkeypatch: pytest.MonkeyPatch) -> QuickTime:
    return QuickTime(open_bucket(run.url), monkeypatch)


@pytest.fixture
def follower(time: QuickTime, vllm: InMemoryVllm, tmp_path: Path) -> Follower:
    """It looks once a second."""
    return Follower(RunReader(time, RUN), vllm, name="r", folder=tmp_path / "r", poll_s=1.0)


def test_a_bucket_that_a_trainer_has_yet_to_create_is_waited_for(tmp_path: Path, vllm: InMemoryVllm) -> None:
    bucket = open_bucket(f"file://{tmp_path}/later")
    follower = Follower(RunReader(bucket, RUN), vllm, name="r", folder=tmp_path / "r", poll_s=0.01)
    follower.start()
    try:
        soon(lambda: error(follower))
    finally:
        follower.stop()
    assert error(follower).endswith("or mount it, or start the trainer, which creates it")


def error(follower: Follower) -> str:
    return follower.report(0).status.error or ""


def damaged(run: Drifting, name: str) -> Callable[[], object]:
    """Damage a file of the anchor; what is returned mends it."""
    (ref,) = (ref for ref in run.newest.anchor.files if ref.name == name)
    path = run.folder / ref.key
    whole = path.read_bytes()
    path.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    return lambda: path.write_bytes(whole)


def head_of(run: Drifting) -> Path:
    (path,) = (run.folder / "runs" / RUN / "heads").iterdir()
    return path


def test_a_damaged_tokenizer_costs_no_download_of_the_weights(run, time, follower, vllm) -> None:
    mend = damaged(run, TOKENIZER)
    time.pass_for(31, follower)
    assert TOKENIZER in error(follower)
    assert time.fetched_of(TOKENIZER) <= IN_31_S
    assert time.fetched_of(WEIGHTS) == 0, "small files first"
    mend()
    time.pass_for(64, follower)
    assert vllm.digest() == run.newest.digest
    assert error(follower) == ""


def test_damaged_weights_are_fetched_ever_more_seldom_and_the_rest_once(run, time, follower, vllm) -> None:
    mend = damaged(run, WEIGHTS)
    time.pass_for(3600, follower)
    assert time.fetched_of(WEIGHTS) <= IN_AN_HOUR
    assert time.fetched_of(TOKENIZER) == 1, "it is kept"
    mend()
    follower.commands.heal()
    time.pass_for(3, follower)
    assert vllm.digest() == run.newest.digest, "the owner's order ends the pause"


def test_versions_that_a_serving_vllm_refuses_copy_a_checkpoint_ever_more_seldom(
    run, time, follower, vllm, monkeypatch
) -> None:
    """One each second, and each may be the one that vLLM takes, so that its deltas are always tried."""
    time.pass_for(2, follower)
    commit = vllm.commit
    monkeypatch.setattr(vllm, "commit", mock.Mock(side_effect=errors.EngineError("no", "route")))
    vllm.compared = 0
    time.in_pauses = run.step
    time.pass_for(6, follower)
    assert vllm.compared <= 3, "after 0, 1 and 3 seconds; there were five"
    assert (follower.serving.version, error(follower)) == (0, "no")
    monkeypatch.setattr(vllm, "commit", commit)
    time.pass_for(2, follower)
    assert follower.serving.version > 6


def test_follow_fetches_what_is_whole_once_and_tries_ever_more_slowly(run, time, tmp_path) -> None:
    mend = damaged(run, WEIGHTS)
    time.in_pauses = lambda: time.now == 32 and mend()
    result = time.follow(70, RUN, tmp_path / "kept")
    assert len(result.complaint.splitlines()) == 1, result.complaint
    assert time.fetched_of(TOKENIZER) == 1
    assert time.fetched_of(WEIGHTS) <= IN_31_S + 1
    assert (tmp_path / "kept" / "current" / WEIGHTS).exists()


@pytest.mark.parametrize("news", ["poke", "the same HEAD again"])
def test_a_new_version_ends_the_pause_and_no_other_news_does(run, time, follower, news) -> None:
    time.pass_for(2, follower)
    delta = run.folder / run.step().deltas[-1].key
    head = head_of(run)
    whole = delta.read_bytes()
    delta.write_bytes(b"damaged")
    time.in_pauses = follower.poke if news == "poke" else lambda: head.write_bytes(head.read_bytes())
    time.pass_for(300, follower)
    assert time.fetched_of("/deltas/") <= 10, "after 0, 1, 3, 7, 15, 31, 63, 127 and 255 seconds"
    delta.write_bytes(whole)
    run.step()
    time.pass_for(2, follower)
    assert follower.serving == run.newest


@pytest.mark.parametrize("flips", ["between old and new", "in its etag alone"])
def test_a_head_that_flips_each_second_starts_no_vllm_and_brings_nothing_old(
    run, time, follower, vllm, flips
) -> None:
    head = head_of(run)
    old = head_of(run).read_bytes()
    for _ in range(4):
        run.step()
    new = head.read_bytes()
    shown = [new if flips == "in its etag alone" else old, new]

    def flip() -> None:
        head.write_bytes(shown[int(time.now) % 2])

    time.in_pauses = flip
    time.pass_for(200, follower)
    assert vllm.starts == 1
    assert [commit.version for commit in follower.report(-1).commits] == [4]
    assert follower.serving == run.newest


@pytest.mark.full
def test_ever_newer_versions_with_other_configurations_start_vllm_ever_more_seldom(run, time, follower, vllm):
    """Whoever may write to an unsigned bucket claims the run each second, with another configuration."""
    time.pass_for(2, follower)
    claimed: list[int] = []
    time.in_pauses = lambda: claimed.append(claim(run, 100 + int(time.now)))
    time.pass_for(200, follower)
    assert vllm.starts <= 9, "after 0, 1, 3, 7, 15, 31, 63 and 127 seconds"
    time.in_pauses = lambda: None
    time.pass_for(400, follower)
    assert follower.serving is not None
    assert follower.serving.writer_term == max(claimed), "the last one in the end: it is the run's"


def test_while_vllm_may_not_be_started_no_checkpoint_is_written(run, time, follower, vllm) -> None:
    time.in_pauses = lambda: (vllm.kill(), run.step())
    with mock.patch.object(follower._layout, "put", wraps=follower._layout.put) as put:
        time.pass_for(60, follower)
    assert put.call_count == vllm.starts


def claim(run: Drifting, term: int) -> int:
    bucket = open_bucket(run.url)
    writer = Writer(term, f"{term:032x}")
    keys = Keys(RUN)
    config = json.dumps({"model_type": "drifting", "term": term}).encode()
    place = keys.anchor(0, writer, "config.json")
    bucket.put(place, config)
    ours = file_ref(place, config)
    others = [ref for ref in run.newest.anchor.files if ref.name != "config.json"]
    fields = {"anchor": {"version": 0, "files": (ours, *others)}, "writer_term": term, "writer": writer.id}
    manifest = renewed(run.newest, **fields)
    bucket.put(keys.manifest(0, writer), manifest.to_bytes())
    head = renewed(RunReader(bucket, RUN).head(), manifest=reference(keys.manifest(0, writer), manifest))
    bucket.delete([info.key for info in bucket.list(keys.heads)])
    bucket.put(keys.head(writer), renewed(head, writer_term=term, writer=writer.id).to_bytes())
    return term


def test_one_stale_read_brings_nothing_back(run, time, follower, vllm, tmp_path) -> None:
    """To a replica, nor to a folder that is kept, also where that is looked at now and then only."""
    there = run.folder / "runs"
    then = tmp_path / "then"
    shutil.copytree(there, then)
    for _ in range(4):
        run.step()
    time.pass_for(2, follower)
    kept = tmp_path / "kept"
    assert time.follow(2, RUN, kept).complaint == ""
    there.rename(tmp_path / "now")
    then.rename(there)
    time.pass_for(1, follower)
    assert "went back from version 4 to 0" in error(follower)
    for words in ((), ("--once",)):
        assert "went back from version 4 to 0" in time.follow(2, RUN, kept, *words).complaint
        assert (kept / "current").resolve().name == "00000004"
    there.rename(then)
    (tmp_path / "now").rename(there)
    time.pass_for(4, follower)
    assert (vllm.starts, len(follower.report(-1).commits), error(follower)) == (1, 1, "")


def test_a_join_that_succeeds_ends_the_pauses_of_earlier_joins(run, time, follower, vllm, monkeypatch):
    run.step()
    with monkeypatch.context() as refusing:
        refusing.setattr(vllm, "take_checkpoint", refused("codec"))
        time.pass_for(100, follower)  # the next join would be after 127 seconds
    follower.commands.pin(0)
    time.pass_for(2, follower)
    monkeypatch.setattr(vllm, "take", refused(errors.WeightsChangedError.kind))
    follower.commands.resume()
    time.pass_for(2, follower)
    assert follower.serving == run.newest, "it joined at once"


def refused(kind: str) -> mock.Mock:
    return mock.Mock(side_effect=errors.EngineError("refused", kind))


# A store that fails is asked about as often as one that works.

Fault = Callable[[str, str], None]
MINUTE = 60
LOOKS = 61


@pytest.fixture
def serving(run: Drifting, time: QuickTime, follower: Follower) -> Follower:
    """It serves version 0."""
    time.pass_for(2, follower)
    assert follower.serving == run.newest
    return follower


def test_a_heal_that_is_refused_does_not_keep_a_replica_from_deltas(
    run, time, serving, vllm, monkeypatch
) -> None:
    monkeypatch.setattr(vllm, "take_checkpoint", refused("codec"))
    serving.commands.heal()
    time.pass_for(20, serving)
    assert serving.report(-1).status.error == "refused", "the owner can read why"
    time.fault = raises(errors.BucketUnreachableError("away"))
    time.pass_for(2, serving)
    assert serving.report(-1).status.error == "away"
    time.fault = lambda operation, key: None
    time.pass_for(MINUTE, serving)
    assert serving.report(-1).status.error == "refused"
    run.step()
    time.pass_for(2, serving)
    assert (serving.serving, serving.report(-1).status.error) == (run.newest, None)
    assert vllm.take_checkpoint.call_count == 1


def asked_in_a_minute(time: QuickTime, follower: Follower) -> int:
    before = time.asked.total()
    time.pass_for(MINUTE, follower)
    return time.asked.total() - before


def raises(error: Exception, *operations: str) -> Fault:
    def fault(operation: str, key: str) -> None:
        if not operations or operation in operations:
            raise error

    return fault


@pytest.mark.parametrize("kind", ["BucketUnreachableError", "AccessDeniedError", "BucketMissingError"])
def test_a_store_that_refuses_everything(time, serving, kind) -> None:
    time.fault = raises(getattr(errors, kind)("refused"))
    assert asked_in_a_minute(time, serving) <= 7, "after 0, 1, 3, 7, 15 and 31 seconds"
    time.fault = lambda operation, key: None
    time.pass_for(64, serving)
    assert serving.report(0).status.error is None, "and it is found again"


@pytest.mark.parametrize("operation", ["get", "fetch"])
def test_a_store_that_tells_of_a_version_and_does_not_hand_it_over(run, time, serving, operation) -> None:
    time.fault = raises(errors.BucketUnreachableError("503"), operation)
    run.step()
    assert asked_in_a_minute(time, serving) <= LOOKS + 7 * 8
    time.fault = lambda operation, key: None
    time.pass_for(64, serving)
    assert serving.serving == run.newest


def test_a_head_that_is_gone_or_damaged_while_nothing_is_new(run, time, serving) -> None:
    head = head_of(run)
    head.write_bytes(b"damaged")
    assert asked_in_a_minute(time, serving) <= LOOKS + 10
    assert "is not a valid Head" in (serving.report(0).status.error or "")
    head.unlink()
    assert asked_in_a_minute(time, serving) <= 2 * LOOKS + 10, "it is looked for"
    assert serving.serving == run.newest


@pytest.mark.finding("N12")
def test_two_hundred_torn_heads_of_which_one_changes_at_each_look(run, time, serving) -> None:
    heads = run.folder / "runs" / RUN / "heads"
    torn = [heads / f"{term:08d}.{term:032x}.json" for term in range(100, 300)]
    head_of(run).write_bytes(b"torn")
    for path in torn:
        path.write_bytes(b"torn")
    time.in_pauses = lambda: torn[int(time.now) % 200].write_bytes(b"torn")
    assert asked_in_a_minute(time, serving) <= 2 * LOOKS + 7 * 24, "a few of them, seven times"
    assert serving.serving == run.newest
    for path in torn:
        path.unlink()
    time.in_pauses = lambda: None
    run.step()
    time.pass_for(64, serving)
    assert serving.serving == run.newest


def test_all_records_are_damaged_and_thousands_are_added(run, time, serving) -> None:
    manifests = run.folder / "runs" / RUN / "manifests"
    for path in (*manifests.iterdir(), *(run.folder / "runs" / RUN / "heads").iterdir()):
        path.write_bytes(b"damaged")
    for version in range(5000):
        (manifests / f"{version:08d}.t9-00000000.json").write_bytes(b"{}")
    assert asked_in_a_minute(time, serving) <= LOOKS + 7 * 140, "64 of them at most, seven times"
    assert serving.serving == run.newest


def test_a_store_that_hides_what_it_has_just_shown(run, time, serving) -> None:
    """Each second another answer."""
    run.step()

    def fault(operation: str, key: str) -> None:
        if operation in ("get", "fetch") and int(time.now) % 2:
            raise errors.ObjectMissingError(f"{key} does not exist")

    time.fault = fault
    assert asked_in_a_minute(time, serving) <= LOOKS + 20
    assert serving.serving == run.newest
