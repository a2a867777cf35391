"""Events add up to exactly the figures that were written, and are drawn."""

import math
import re
import threading
from collections.abc import Iterator

import pytest

from delta_weight_sync.records import LARGEST
from delta_weight_sync.runlog import (
    SEGMENT,
    DoneEvent,
    Event,
    Quantization,
    ReplicaEvent,
    Rollout,
    ScoreEvent,
    StepEvent,
)
from delta_weight_sync.store import open_bucket
from inference_space.dashboard.charts import sync_spans
from inference_space.dashboard.data import RunCache, RunView
from inference_space.dashboard.page import body, render
from inference_space.dashboard.state import FRAMES, POINTS, Curve, Progress, RunState, moments
from tests.inference_space.dashboard.test_data import until, version
from tests.support.buckets import CountedBucket
from tests.support.records import DIGEST, commit, status, sync, traffic
from tests.support.written_run import long


def folded(*events: Event) -> RunState:
    state = RunState()
    state.add(events)
    return state


def progress(*events: Event) -> Progress:
    """What is shown of a run with these events after version 0."""
    run = folded(sync(0, 1100), *events).progress()
    assert run
    return run


def rewards(**metrics: float) -> StepEvent:
    found = {f"games/{name}": rate for name, rate in metrics.items()}
    return StepEvent(t=0, step=1, reward=1.0, metrics=found)


PLAYED = Rollout(turns=(("crane", "c1-r2?a3+n4-e5-"),), reward=0.2, sync=0)
GAMES = StepEvent(t=9, step=0, reward=None, metrics={"sample/taken": 8.0}, rollouts=(PLAYED,))


def test_nothing_is_shown_before_the_first_version() -> None:
    assert folded(status("r", None, state="waiting"), rewards()).progress() is None


def test_the_start_names_what_is_under_way_until_the_first_step() -> None:
    def start(*more: Event) -> list[str]:
        events.extend(more)
        state = folded(*events)
        page = render(RunView("b", "r", progress=state.progress(), read=True, start=state.start()))
        return re.findall("<strong>[VRF].*?</strong><span>(.*?)</span>", page)

    events: list[Event] = []
    assert start(status("r", None, state="waiting"))[1] == "r: waiting"
    assert start(sync(0, 1100, t=4.0))[:2] == ["published, 1 KB", "r: waiting"]
    assert start(commit("r", 0))[1] == "1 of 1 serving"
    assert start(GAMES)[2] == "8 taken by the trainer, the newest below"
    assert folded(*events).start()[:3] == (4.0, 1.0, 9.0)
    assert not folded(*events, sync(1, 10)).start(), "a trainer need not log its steps"
    assert not start(rewards())


def test_all_uploads_after_version_0_are_counted() -> None:
    run = progress(
        traffic(0, anchors=1100, log=5, manifests=1),
        *(sync(1, 30, changed=5), traffic(1, anchors=1100, deltas=30, log=5, manifests=1)),
        *(sync(2, 50, anchor=1100), traffic(2, anchors=2200, deltas=80, log=5, manifests=1)),
        *(sync(3, 40), traffic(3, anchors=2200, deltas=120, log=25, manifests=4, states=500)),
    )
    assert (run.version, run.full_bytes, run.payload_bytes) == (3, 1000, 40)
    assert run.traffic.sent == {"anchors": 1100, "deltas": 120, "log": 20, "manifests": 3, "states": 500}
    assert (run.traffic.sent_bytes, run.sent_full_bytes) == (1743, 3000)
    assert run.sync_bytes == (1743 - 500) / 3, "no replica reads states"
    assert run.curves["deltas"] == ((1, 30), (2, 50), (3, 40))
    assert run.curves["anchors"] == ((0, 1100), (2, 1100))
    assert run.curves["changed"] == ((1, 0.01), (2, 0.02), (3, 0.02))
    assert run.curves["saved"] == ((1, 970), (2, 820), (3, 1257))
    whole = progress(sync(1, 30), sync(2, 1100, anchor=1100, changed=0))
    assert (whole.payload_bytes, "KB anchor" in body(whole)) == (30, False), "it is no delta, and shown once"


def test_a_commit_moves_its_replica_and_costs_the_slowest() -> None:
    commits = commit("x", 1, lag_s=4, pause_ms=7), commit("y", 1, lag_s=2, pause_ms=9)
    run = progress(sync(1, 30), *commits, sync(2, 30))
    shown = [(r.status.replica, r.status.version, run.behind(r.status), r.lag_s) for r in run.replicas]
    assert shown == [("x", 1, 1, 4), ("y", 1, 1, 2)]
    assert (run.pause_ms, run.worst_pause_ms, run.lag_s) == (8, 9, 3)
    (newest, uncommitted), (first, slowest), _ = run.syncs
    assert (newest.version, uncommitted, first.version) == (2, None, 1)
    assert slowest
    assert (slowest.replica, slowest.pause_ms, slowest.commit_ms) == ("x", 7, 3.5)
    assert run.curves["pauses"] == ((1, 7), (1, 9))


def test_a_sync_on_the_clock_ends_with_the_last_replicas_commit() -> None:
    run = progress(sync(1, 30), commit("x", 1, lag_s=4, pause_ms=500), commit("y", 1, lag_s=2))
    event, slow = run.syncs[0]
    published = [("diff", 0.0, 0.1), ("publish", 0.1, 0.3)]
    taken = [("idle", 0.3, 0.5), ("fetch", 0.5, 2.5), ("stage", 2.5, 3.5), ("pause", 3.5, 4)]
    assert sync_spans(event, slow) == published + taken
    assert sync_spans(event, None) == published


def test_what_a_replica_answers_replaces_what_was_known() -> None:
    down = status("x", None, state="down", error="no answer")
    run = progress(sync(1, 9), commit("x", 1), down)
    (x,) = run.replicas
    assert (x.status.state, x.status.version, x.status.error) == ("down", None, "no answer")
    assert (run.behind(x.status), run.matches(x.status)) == (None, None)
    assert math.isnan(x.versions[-1][1]), "the staircase breaks off where a replica serves nothing"
    assert not progress(sync(1, 9), down, status("x", None, state="removed")).replicas


def test_replicas_that_quantize_to_other_bytes_are_named() -> None:
    def quantized(replica: str, version: int, digest: str, scheme: str = "fp8_per_block") -> ReplicaEvent:
        made = Quantization(scheme=scheme, digest=digest, changed=1)
        return status(replica, version).model_copy(update={"quantized": made})

    run = progress(
        *(sync(1, 9), sync(2, 9), quantized("x", 2, "a" * 16), quantized("y", 2, "a" * 16)),
        *(quantized("older", 1, "b" * 16), quantized("coarser", 2, "c" * 16, "fp8_per_tensor")),
        status("plain", 2),
    )
    assert {run.quantized_otherwise(replica.status) for replica in run.replicas} == {None}
    run = progress(sync(2, 9), quantized("x", 2, "a" * 16), quantized("y", 2, "b" * 16))
    assert [run.quantized_otherwise(replica.status) for replica in run.replicas] == ["y", "x"]
    page = str(body(run))
    assert "not as in y: another release of vLLM or kind of device?" in page
    assert "a" * 16 in page
    after = progress(sync(2, 9), quantized("x", 1, "a" * 16), commit("x", 2))
    assert after.replicas[0].status.quantized is None, (
        "a commit does not say how the new weights are quantized"
    )


def test_a_replicas_own_status_is_shown_in_place_of_the_logs() -> None:
    state = folded(sync(0, 1100), sync(1, 9), sync(2, 9), status("other", 1), commit("mine", 1))
    state.digests[2] = DIGEST
    before = state.progress()
    now = state.progress([status("mine", 2, state="serving", error="disk full")])
    assert before
    assert now
    assert now.replicas[1] == before.replicas[1], "of other replicas the log tells"
    mine = now.replicas[0]
    assert (mine.status.version, mine.status.error) == (2, "disk full")
    assert (now.behind(mine.status), now.matches(mine.status)) == (0, True)
    assert (mine.lag_s, mine.lags) == (before.replicas[0].lag_s, before.replicas[0].lags)
    assert mine.versions == (*before.replicas[0].versions, (now.last_t, 2))
    assert state.progress().replicas == before.replicas, "the run itself is as it was"
    ahead = state.progress([status("mine", 3, state="serving")])  # the log's next refresh shows version 3
    assert "v2 serving on 1/2 replicas" in body(ahead)
    new = state.progress([status("new", None, state="starting")])
    assert [r.status.state for r in new.replicas if r.status.replica == "new"] == ["starting"]


@pytest.mark.parametrize(("published", "ok"), [(DIGEST, True), ("b" * 16, False), (None, None)])
def test_replicas_and_the_trainer_are_compared_with_the_published_digest(published, ok) -> None:
    state = folded(sync(0, 1100), sync(1, 9), commit("x", 1), DoneEvent(t=1, version=0, digest=DIGEST))
    assert state.served() == {0, 1}
    state.digests |= {0: published, 1: published}
    run = state.progress()
    assert run
    assert (run.matches(run.replicas[0].status), run.matches(run.done)) == (ok, ok)
    state.add([sync(2, 9)])
    assert state.progress().done is None, "training went on"


def test_rates_come_from_the_steps_that_have_them() -> None:
    given = {1: 0.5, 2: None, 3: None, 4: 0.75}
    steps = [StepEvent(t=0, step=step, reward=reward, metrics={}) for step, reward in given.items()]
    rated = rewards(solve_rate=0.5, invalid_rate=0.1).model_copy(update={"step": 5})
    stale = StepEvent(t=0, step=6, reward=None, metrics={"sample/staleness_mean": 2.0})
    run = progress(*steps, rated, stale)
    assert run.curves["reward"] == ((1, 0.5), (4, 0.75), (5, 1.0))
    assert (run.reward_steps, run.reward_first, run.reward_lately) == (1, 0.5, 1.0), "the windows are apart"
    rates = [run.curves[name] for name in ("solved", "invalid", "staleness")]
    assert rates == [((5, 0.5),), ((5, 0.1),), ((6, 2.0),)]
    assert run.group is None


@pytest.mark.parametrize("again", [0, 390])
def test_steps_that_a_trainer_takes_again_replace_the_earlier_ones(again: int) -> None:
    """It resumed from step `again`, or started again."""

    def steps(first: int, last: int, value: float) -> list[StepEvent]:
        metrics = {"loss": value, "games/solve_rate": value}
        return [StepEvent(t=0, step=n, reward=value, metrics=metrics) for n in range(first, last)]

    run = progress(*steps(1, 400, 1.0), *steps(again + 1, again + 11, 2.0))
    for curve in (run.curves["reward"], run.curves["solved"], run.metrics["Loss"]):
        across = [step for step, _ in curve]
        assert across == sorted(set(across))
        assert (across[-1], curve[-1][1]) == (again + 10, 2.0)
        assert len(curve) == 10 if not again else curve[0][1] == 1.0
    assert (run.reward_first, run.reward_lately) == ((1.0, 1.5) if again else (2.0, 2.0))


def test_the_staircase_of_a_stuck_replica_reaches_into_the_window() -> None:
    run = progress(sync(1, 9), commit("stuck", 1), *(sync(n, 9) for n in range(2, 101)))
    assert run.trainer[-1] == (1000, 100)
    assert run.replicas[0].versions == ((run.trainer[0][0], 1),)
    assert run.behind(run.replicas[0].status) == 99


def test_a_long_curve_stays_short_and_loses_neither_its_spike_nor_its_end() -> None:
    peaks = Curve(peaks=True)
    means = Curve()
    for n in range(10_000):
        for curve in (peaks, means):
            curve.add(n, 100.0 if n == 7777 else 1.0 + n % 2)
            assert n != POINTS - 1 or curve.points() == tuple((m, 1.0 + m % 2) for m in range(POINTS))
    for curve in (peaks, means):
        assert POINTS // 2 <= len(curve.points()) <= POINTS + 1
        assert curve.points()[-1] == (9999, 2.0)
    assert max(peaks.points(), key=lambda point: point[1]) == (pytest.approx(7777, abs=34), 100.0)
    assert means.points()[0] == (pytest.approx(31.5), 1.5)


@pytest.mark.finding(11)
@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 1e-9, LARGEST, -LARGEST])
def test_every_number_that_a_log_can_hold_is_drawn(value: float) -> None:
    """Nothing that a line of the log says turns the page into an error."""
    largest = (1 << 62) - 1
    first = sync(0, 1100).model_copy(update={"diff_s": value, "encode_s": value, "publish_s": value})
    events: list[Event] = [first]
    for number, t in ((1, 0.0), (2, 253_402_300_799.0), (largest, 1.0)):
        counts = dict.fromkeys(("payload_bytes", "anchor_bytes", "full_bytes", "changed", "total"), largest)
        events.append(first.model_copy(update={"version": number, "t": t} | counts))
        spent = dict.fromkeys(("lag_s", "fetch_s", "stage_s", "pause_ms", "commit_ms"), value)
        events.append(commit("x", 1).model_copy(update=spent | {"version": number, "t": t}))
        metrics = dict.fromkeys(("games/solve_rate", "games/invalid_rate", "sample/staleness_mean"), value)
        step = {0.0: 0, 1.0: largest}.get(t, 1)
        events.append(StepEvent(t=t, step=step, reward=value, metrics=metrics))
        events.append(StepEvent(t=t, step=step, reward=1.0, metrics=dict.fromkeys(metrics, 1.0)))
    page = render(RunView("b", "r", progress=folded(*events).progress(), read=True))
    assert len(page) < 200_000


@pytest.mark.finding(11)
def test_names_of_replicas_fill_no_memory() -> None:
    events = [status(f"replica-{number}", 1) for number in range(5000)]
    run = progress(*events, *(status("x", 1 + version % 2) for version in range(5000)))
    assert len(run.replicas) == 128
    assert {"replica-4999", "x"} <= {replica.status.replica for replica in run.replicas}
    assert max(len(replica.versions) for replica in run.replicas) <= 257


VERSIONS = 10_000
REPLICAS = ("replica-0", "replica-1", "replica-2")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> CountedBucket:
    bucket = open_bucket(f"file://{tmp_path_factory.mktemp('long')}/bucket", create=True)
    long(bucket, VERSIONS, REPLICAS)
    return CountedBucket(bucket)


@pytest.fixture(scope="module")
def cache(bucket: CountedBucket) -> Iterator[RunCache]:
    """It reads the run once, and then only when a test makes it."""
    return RunCache(bucket, None, pause=lambda until, seconds: threading.Event().wait())


@pytest.fixture
def view(cache: RunCache) -> RunView:
    return until(cache, lambda view: version(view) == VERSIONS)


@pytest.mark.full
def test_the_first_reading_takes_each_segment_once(bucket: CountedBucket, view: RunView) -> None:
    segments = -(-VERSIONS // SEGMENT)
    assert bucket.asked["get"] <= segments + 6, "every segment, run.json, HEAD, and the newest manifest"
    assert view.progress
    served = [replica.status for replica in view.progress.replicas]
    assert [(one.version, view.progress.matches(one)) for one in served] == [(VERSIONS, True)] * 3
    assert "v10000 serving on 3/3 replicas" in render(view)


def test_metrics_and_scores_have_bounded_curves_known_ones_first() -> None:
    steps = [
        StepEvent(
            t=1.0, step=n, reward=None, metrics={"my/own": float(n), "loss": 1 / n, "train_runtime": 9.0}
        )
        for n in range(1, 1001)
    ]
    score = ScoreEvent(t=2.0, version=2, digest=DIGEST, name="mmlu", scores={"accuracy": 0.61}, seconds=1.0)
    many = StepEvent(t=3.0, step=1001, reward=None, metrics={f"other{n}": 1.0 for n in range(200)})
    shown = folded(sync(0, 1100), sync(1, 9), sync(2, 9), *steps, score, many).progress()
    assert shown
    assert [*shown.metrics][:2] == ["Loss", "my/own"]
    assert shown.scores == {"mmlu: accuracy": ((2, 0.61),)}
    assert shown.metrics["my/own"][-1] == (1000, 1000.0)
    assert len(shown.metrics) == 12
    assert max(map(len, shown.metrics.values())) <= 121


def score(version: int, value: float) -> ScoreEvent:
    return ScoreEvent(t=1.0, version=version, digest=DIGEST, name="eval", scores={"loss": value}, seconds=1.0)


@pytest.mark.parametrize("order", [(range(5, 10), range(5)), (range(0, 10, 2), range(1, 10, 2))])
def test_scores_are_drawn_by_version_in_whatever_order_they_are_read(order: tuple[range, range]) -> None:
    """Each start of `evaluate` writes a log under a random name, and --every may be smaller than before."""
    full = [StepEvent(t=1.0, step=1, reward=1.0, metrics={f"own{n}": 1.0 for n in range(12)})]
    scores = [score(version, 1 - version / 10) for part in order for version in part]
    run = folded(*scores, *(sync(version, 9) for version in range(10)), *full).progress()
    assert run
    assert run.scores["eval: loss"] == tuple((version, 1 - version / 10) for version in range(10))
    page = str(body(run))
    (panel,) = re.findall(r"<h2>eval: loss</h2>.*?</figure>", page, re.DOTALL)
    assert "<output>0.1</output><p>of each evaluated version, and its trend</p>" in panel
    assert 'data-x="version ' in panel


def test_scores_of_a_long_run_have_bounded_curves_that_end_at_the_newest() -> None:
    newest = 20_000
    run = folded(*(score(n, n) for n in range(newest + 1)), sync(newest, 9)).progress()
    assert run
    curve = run.scores["eval: loss"]
    assert curve[-1] == (newest, newest)
    assert 60 <= len(curve) <= 121
    assert folded(score(3, 1.0), sync(2, 9)).progress().scores["eval: loss"] == (), "not of this moment"


def test_a_refresh_reads_and_sends_no_more_than_that_of_a_short_run(bucket, cache, view) -> None:
    before = bucket.asked.total()
    cache._refresh()
    assert bucket.asked.total() - before <= 6
    assert len(render(view)) < 150_000
    assert view.progress
    curves = [value for value in vars(view.progress).values() if isinstance(value, tuple)]
    curves += view.progress.curves.values()
    curves += [curve for replica in view.progress.replicas for curve in (replica.versions, replica.lags)]
    assert max(map(len, curves)) <= POINTS + 1, "what a page shows does not grow with the run"


def test_looking_back_reads_nothing_of_the_log_again(bucket, cache, view) -> None:
    before = bucket.asked["get"]
    pages = {one: body(cache.state.at(one, lambda versions: {})) for one in moments(VERSIONS)[:-1]}
    assert bucket.asked["get"] == before
    assert 1 < len(pages) <= FRAMES
    assert all(f"v{one} serving on 3/3 replicas" in page for one, page in pages.items() if one)
    assert "v0 published, no replica has reported yet" in pages[0]
