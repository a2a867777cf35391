"""The outbox: readers rebuild exactly what the trainer handed over. The undo log restores earlier syncs."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from delta_weight_sync import Publisher, codec
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import BucketUnreachableError, ConfigError, FencedError, UndoLogError
from delta_weight_sync.publish.outbox import Outbox, PendingUpdate
from delta_weight_sync.publish.spans import undo
from delta_weight_sync.publish.undo import UndoLog, bf16_bits
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import RunLogReader, SyncEvent
from delta_weight_sync.store import Bucket, open_bucket
from tests.support.held import held
from tests.support.real_run import PATIENCE_S, RUN, TENSORS, Drifting, SlowLink
from tests.support.waiting import soon


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[[], Drifting]]:
    """Trainers of one run in a folder; each begins with the same weights, and publishes them."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Drifting(tmp_path / "bucket")))


@pytest.fixture
def make_run_anywhere(bucket_url: str) -> Iterator[Callable[[], Drifting]]:
    """The same in each kind of store."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Drifting(open_bucket(bucket_url))))


def rebuilt(run: Drifting, tmp_path: Path) -> str:
    return to_hex(state_digest(run.reader.checkout(run.reader.manifest(), tmp_path / "out")))


def test_a_slow_link_skips_versions_and_loses_nothing(make_run, tmp_path, monkeypatch):
    """The trainer hands over nineteen times during one upload: they become one version."""
    run = make_run()
    link = SlowLink(run.reader.bucket, "/deltas/")
    run.move()
    run.publish()
    link.wait()
    for _ in range(19):
        run.move()
        run.publish()
    assert run.outbox.version == 0, "the upload is still under way"
    link.up.set()
    manifest = run.flush()
    assert (manifest.version, manifest.sync) == (2, 20), "the newest weights are published"
    assert rebuilt(run, tmp_path) == run.digest()
    assert [m.sync for m in run.reader.versions()] == [20, 1, 0]


def one_by_one(bucket: Bucket, put: Callable[[str, bytes | Path], None], monkeypatch) -> None:
    """A batch that fails at one object has stored the objects before it, on the Hub too."""
    monkeypatch.setattr(bucket, "put", put)
    monkeypatch.setattr(bucket, "put_all", lambda objects, _: [put(*each) for each in objects])


def fail(bucket: Bucket, part: str, times: int, stored: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the first uploads to keys with `part` fail. `stored`: only the answer is lost. Returns how many are
    still to fail."""
    put = bucket.put
    failures = [times]

    def failing_put(key: str, data: bytes | Path) -> None:
        if part not in key or not failures[0]:
            return put(key, data)
        failures[0] -= 1
        if stored:
            put(key, data)
        raise BucketUnreachableError(f"{key}: the link is down")

    one_by_one(bucket, failing_put, monkeypatch)
    monkeypatch.setattr("delta_weight_sync.publish.outbox._RETRY_S", 0.05)
    return failures


@pytest.mark.parametrize("part", ["deltas/", "manifests/", "heads/"])
@pytest.mark.parametrize("stored", [False, True], ids=["lost", "stored-but-unanswered"])
def test_a_failing_upload_is_repeated_and_nothing_is_lost(
    make_run, tmp_path, monkeypatch, caplog, part, stored
):
    run = make_run()
    fail(run.reader.bucket, part, 3, stored, monkeypatch)
    for _ in range(3):
        run.move()
        run.publish()
    manifest = run.flush()
    assert rebuilt(run, tmp_path) == run.digest()
    assert [m.version for m in run.reader.versions()] == list(range(manifest.version, -1, -1))
    assert "the link is down; trying again" in caplog.text


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", "manifests/"])
@pytest.mark.parametrize("stored", [False, True], ids=["lost", "stored-but-unanswered"])
def test_a_failing_upload_of_version_0_is_repeated(tmp_path, monkeypatch, caplog, part, stored):
    bucket = open_bucket((tmp_path / "bucket").as_uri(), create=True)
    failures = fail(bucket, part, 2, stored, monkeypatch)
    with closing(Drifting(bucket)) as run:
        assert failures == [0]
        assert rebuilt(run, tmp_path) == run.digest()
        run.step()
        assert [m.version for m in run.reader.versions()] == [1, 0]
        assert rebuilt(run, tmp_path) == run.digest()
    assert "version 0 has not reached the bucket for 0 s" in caplog.text


def test_a_publisher_that_is_closed_during_the_upload_of_version_0_says_so(tmp_path, monkeypatch):
    bucket = open_bucket((tmp_path / "bucket").as_uri(), create=True)
    put = bucket.put
    weights = {"w": torch.ones(4)}
    assets = tmp_path / "assets"
    assets.mkdir()
    outbox = Outbox(RunWriter(bucket, "run", model="m", assets=assets), None)

    def closing_put(key: str, data: bytes | Path) -> None:
        if "anchors/" not in key:
            return put(key, data)
        outbox.close()
        raise BucketUnreachableError(f"{key}: the link is down")

    one_by_one(bucket, closing_put, monkeypatch)
    monkeypatch.setattr("delta_weight_sync.publish.outbox._RETRY_S", 0.05)
    with pytest.raises(ConfigError, match="closed before version 0 was in the bucket"):
        outbox.publish(held(weights.items()), 0)


def test_a_published_version_never_changes_its_content(make_run_anywhere, monkeypatch):
    """HEAD was stored but the answer was lost: replicas may serve that version, so it must stay."""
    run = make_run_anywhere()
    put = run.reader.bucket.put
    seen = {}
    lost = [2]

    def put_without_answer(key: str, data: bytes | Path) -> None:
        put(key, data)
        if "/heads/" in key:
            head = run.reader.head()
            assert head is not None
            assert seen.setdefault(head.version, head.manifest.sha256) == head.manifest.sha256
            if lost[0]:
                lost[0] -= 1
                run.move()
                run.publish()
                raise BucketUnreachableError("no answer")

    one_by_one(run.reader.bucket, put_without_answer, monkeypatch)
    monkeypatch.setattr("delta_weight_sync.publish.outbox._RETRY_S", 0.05)
    run.step()
    assert len(seen) >= 2


def test_a_second_trainer_takes_over_and_the_first_is_fenced_off(make_run_anywhere, tmp_path):
    first = make_run_anywhere()
    first.step()
    second = make_run_anywhere()
    assert (second.newest.version, second.newest.writer_term) == (2, 2)
    assert 0 < second.newest.changed < second.newest.total, "it continues from the published bits"
    first.move()
    first.publish()
    with pytest.raises(FencedError, match="taken over by another trainer"):
        first.flush()
    assert rebuilt(second, tmp_path) == second.digest()


@pytest.mark.parametrize("part", ["anchors", "deltas"])
def test_a_run_whose_files_are_damaged_goes_on_with_a_new_anchor(make_run, tmp_path, part, caplog):
    run = make_run()
    run.step()
    run.close()
    for path in (tmp_path / "bucket/runs" / RUN / part).rglob("*.safetensors"):
        path.write_bytes(b"torn")
    resumed = make_run()
    for version in (2, 3):
        assert (resumed.newest.version, resumed.newest.anchor.version) == (version, 2)
        assert rebuilt(resumed, tmp_path) == resumed.digest()
        resumed.step()
    assert "the next sync uploads all weights" in caplog.text


def test_a_pin_is_answered_while_the_version_is_stored_but_still_in_flight(make_run, monkeypatch):
    """The thread that published the version makes no further announcement that could answer the pin."""
    run = make_run()
    stored = threading.Event()
    go_on = threading.Event()
    monkeypatch.setattr(run.outbox.shortcuts, "add", lambda *_: stored.set() or go_on.wait(60))
    run.move()
    run.publish()
    assert stored.wait(60)
    assert run.outbox.pin()
    answer = threading.Thread(target=run.outbox.pinned, daemon=True)
    answer.start()
    answer.join(20)
    go_on.set()
    assert not answer.is_alive()
    assert run.outbox.pinned() == run.flush()


def test_anchors_keep_the_way_in_short(make_run, tmp_path):
    run = make_run()
    run.rate = 0.05  # nearly every weight changes: a delta costs about as much as the model
    for _ in range(12):
        newest = run.step()
        assert len(newest.recipe().deltas) <= 2, "the one since the anchor that was being made, and this one"
        run.settle()
    assert newest.anchor.version > 0
    assert rebuilt(run, tmp_path) == newest.digest


def test_pending_updates_are_undone_in_one_pass():
    class Walked(list):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    old = np.zeros(2, np.uint16)
    names = [f"expert.{i}" for i in range(2000)]
    once = [Walked(codec.diff(name, old + step, old + step + 1) for name in names) for step in (0, 1)]
    pending = [
        PendingUpdate(patches, digest="", own="", sync=0, created_at=0.0, diff_s=0.0) for patches in once
    ]
    for name in names:
        patches = (update.by_name.get(name) for update in reversed(pending))
        bits = old + 2
        undo(bits, patches)
        np.testing.assert_array_equal(bits, old)
    assert [patches.times for patches in once] == [1, 1]


NAMES = list(TENSORS)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([*NAMES, "head.weight"], r"parameter head\.weight is not part of the run"),
        (NAMES[:-1], r"parameter norm\.weight was not published"),
    ],
)
def test_another_model_is_refused_and_nothing_follows(make_run, tmp_path, names, sentence):
    """The changes of its first tensors are lost, so later changes would not fit."""
    run = make_run()
    run.move()
    weights = run.weights | {"head.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=sentence):
        run.outbox.publish(held((name, weights[name]) for name in names), 2)
    for again in (run.publish, run.flush):
        with pytest.raises(ValueError, match=sentence):
            again()
    assert rebuilt(run, tmp_path) == run.newest.digest != run.digest()


def test_after_a_failed_hand_over_what_is_being_published_is_not_tried_again(make_run, monkeypatch):
    monkeypatch.setattr("delta_weight_sync.publish.outbox._RETRY_S", 0.05)
    run = make_run()
    with mock.patch.object(run.reader.bucket, "put_all", side_effect=BucketUnreachableError("down")) as put:
        run.move()
        run.publish()
        soon(lambda: put.called)
        with pytest.raises(ValueError, match="was not published"):
            run.outbox.publish([], 2)
    soon(lambda: not run.outbox._busy)
    assert run.reader.manifest().version == 0, "old bits, which the mirror gives, may be wrong by now"


def test_the_log_tells_what_was_published(make_run):
    run = make_run()
    run.step()
    run.step()
    run.log.flush()
    syncs = [e for e in RunLogReader(run.reader.bucket, RUN).poll() if isinstance(e, SyncEvent)]
    manifests = {m.version: m for m in run.reader.versions()}
    assert [s.version for s in syncs] == [0, 1, 2]
    for sync in syncs[1:]:
        assert sync.payload_bytes == manifests[sync.version].deltas[-1].size
        assert sync.changed == manifests[sync.version].changed


SYNCS = 5
EVERY = np.arange(1 << 16).astype(np.uint16)  # all bit patterns, with -0.0, infinities and NaN
DTYPES = [torch.float32, torch.bfloat16]


def weights_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """bf16 patterns as weights. float32 is built from bits, because a cast may change NaN."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(bits.view(np.int16).copy()).view(dtype)
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.int32)).view(dtype)


@pytest.fixture(scope="module")
def walk() -> list[dict[str, np.ndarray]]:
    """Bits at syncs 1 to 5: each pattern of "every" becomes another one; two weights of "few" move."""
    numbers = np.random.default_rng(0)
    states = []
    few = np.zeros((40, 30), np.uint16)
    for sync in range(SYNCS):
        few = few.copy()
        few[sync, 2 * sync : 2 * sync + 2] = 0x8000 - sync
        states.append({"every": numbers.permutation(EVERY), "few": few})
    return states


def past_of(walk: list[dict[str, np.ndarray]], keep: int = SYNCS) -> UndoLog:
    past = UndoLog(1, keep)
    for sync, (old, new) in enumerate(itertools.pairwise(walk), start=2):
        past.add(sync, [codec.diff(name, old[name], new[name]) for name in old])
    return past


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_sync_is_restored_from_any_other_by_writing_what_differs(walk, dtype):
    past = past_of(walk)
    for start, end in itertools.product(range(1, SYNCS + 1), repeat=2):
        weights = {name: weights_of(bits, dtype) for name, bits in walk[start - 1].items()}
        written = past.roll(weights, start, end)
        for name, bits in walk[end - 1].items():
            expected = weights_of(bits, dtype)
            assert torch.equal(bf16_bits(weights[name]), bf16_bits(expected)), (name, start, end)
            if dtype == torch.float32:
                assert torch.equal(weights[name].view(torch.int32), expected.view(torch.int32))
        low, high = sorted((start, end))
        between = itertools.pairwise(walk[low - 1 : high])
        assert written == sum(int((old[name] != new[name]).sum()) for old, new in between for name in old)


def test_what_is_not_kept_is_refused_before_anything_is_written(walk):
    past = past_of(walk, keep=2)
    assert past.syncs == [3, 4, 5]
    weights = {name: weights_of(bits, torch.float32) for name, bits in walk[4].items()}
    with pytest.raises(UndoLogError, match="the undo log holds syncs 3 to 5, not 2; call `keep_undo_log`"):
        past.roll(weights, 5, 2)
    assert torch.equal(bf16_bits(weights["every"]), torch.from_numpy(walk[4]["every"].view(np.int16)))
    past.roll(weights, 5, 3)
    assert torch.equal(bf16_bits(weights["every"]), torch.from_numpy(walk[2]["every"].view(np.int16)))


def test_weights_that_cannot_hold_every_published_one_are_refused():
    with pytest.raises(ValueError, match=r"torch\.float16 weights cannot be moved .*: use float32"):
        bf16_bits(torch.zeros(3, dtype=torch.float16))


def test_a_sync_without_a_version_of_its_own_is_restored_too(tmp_path: Path):
    """The link is slow, so syncs 2 to 4 become one version."""
    (tmp_path / "config.json").write_text("{}")
    url = f"{tmp_path.as_uri()}/bucket#run"
    up = threading.Event()
    weights = {"a": torch.ones(50, 40), "b": torch.ones(9)}
    handed_over = {}
    with Publisher(url, tmp_path) as publisher:
        publisher.publish(weights.items())
        past = publisher.keep_undo_log(SYNCS)
        put = publisher._writer.put_delta
        publisher._writer.put_delta = lambda *arguments: (up.wait(PATIENCE_S), put(*arguments))[1]
        for sync in range(2, SYNCS + 1):
            weights["a"][sync] += 0.1
            weights["b"][sync - 2 :] *= 1.5
            publisher.publish(weights.items())
            handed_over[sync] = {name: to_bits(tensor) for name, tensor in weights.items()}
        up.set()
        newest = publisher.flush()
    assert newest.version < SYNCS - 1
    rolled = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    at = SYNCS
    for sync in (3, 2, 4, 5):
        past.roll(rolled, at, sync)
        at = sync
        for name, bits in handed_over[sync].items():
            np.testing.assert_array_equal(to_bits(rolled[name]), bits)
    state = open_run(url).checkout(newest, tmp_path / "out")
    np.testing.assert_array_equal(to_bits(rolled["a"]), state["a"])


def test_syncs_without_changes_after_a_pinned_one_are_merged(tmp_path):
    """They have the pinned sync's digest, so the outbox might take each of them for the pinned one."""
    run = Drifting(tmp_path / "bucket")
    link = SlowLink(run.reader.bucket, "/deltas/")
    run.move()
    run.publish()
    link.wait()
    run.move()
    run.publish()
    assert run.outbox.pin()
    for _ in range(20):
        run.publish()
    assert len(run.outbox._updates) <= 2
    link.up.set()
    assert run.flush().version <= 4
    run.close()
