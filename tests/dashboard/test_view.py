"""Events add up to exactly the figures that were written."""

from __future__ import annotations

import math

import pytest

from delta_weight_sync.runlog import (
    CanaryEvent,
    CommitEvent,
    DoneEvent,
    Event,
    ReplicaEvent,
    StepEvent,
    SyncEvent,
)
from inference_space.dashboard.run_state import RunState
from inference_space.dashboard.series import POINTS, Curve
from inference_space.dashboard.timeline import spans

A, B = "a" * 16, "b" * 16


def sync(
    version: int, payload: int, *, anchor: int = 0, changed: int = 10, t: float | None = None
) -> SyncEvent:
    return SyncEvent(
        t=10.0 * version if t is None else t,
        version=version,
        sync=version,
        payload_bytes=payload,
        anchor_bytes=anchor,
        full_bytes=1000,
        changed=changed,
        total=500,
        diff_s=0.1,
        encode_s=0.2,
        publish_s=0.3,
    )


def commit(
    replica: str, version: int, *, lag_s: float = 1.0, pause_ms: float = 5.0, digest: str = A
) -> CommitEvent:
    return CommitEvent(
        t=10.0 * version + lag_s,
        replica=replica,
        version=version,
        digest=digest,
        lag_s=lag_s,
        fetch_s=lag_s / 2,
        stage_s=lag_s / 4,
        pause_ms=pause_ms,
        commit_ms=pause_ms / 2,
    )


def status(
    replica: str, version: int | None, *, state: str = "serving", error: str | None = None
) -> ReplicaEvent:
    return ReplicaEvent(t=0, replica=replica, state=state, version=version, digest=version and A, error=error)


def canary(replica: str, version: int, difference: float) -> CanaryEvent:
    return CanaryEvent(t=0, replica=replica, version=version, difference=difference, limit=0.5)


def folded(*events: Event) -> RunState:
    state = RunState()
    state.add(events)
    return state


def test_nothing_is_shown_before_the_first_version() -> None:
    assert (
        folded(status("r", None, state="waiting"), StepEvent(t=0, step=1, reward=1.0, metrics={})).progress()
        is None
    )


def test_bytes_are_counted_from_version_1_and_anchors_count_as_sent() -> None:
    run = folded(sync(0, 1100), sync(1, 30), sync(2, 50, anchor=1100), sync(3, 40)).progress()
    assert run
    assert (run.version, run.full_bytes, run.payload_bytes) == (3, 1000, 40)
    assert (run.sent_bytes, run.sent_full_bytes) == (30 + 50 + 1100 + 40, 3000)
    assert run.deltas == ((1, 30), (2, 50), (3, 40))
    assert run.anchors == ((0, 1100), (2, 1100))


def test_share_changed_counts_elements() -> None:
    run = folded(sync(0, 1100, changed=500), sync(1, 30, changed=5), sync(2, 30, changed=10)).progress()
    assert run
    assert run.changed == ((1, 0.01), (2, 0.02))


def test_a_commit_moves_its_replica_and_costs_the_slowest() -> None:
    run = folded(
        sync(0, 1100),
        sync(1, 30),
        commit("x", 1, lag_s=4, pause_ms=7),
        commit("y", 1, lag_s=2, pause_ms=9),
        sync(2, 30),
    ).progress()
    assert run
    assert [(r.name, r.version, r.behind, r.lag_s) for r in run.replicas] == [("x", 1, 1, 4), ("y", 1, 1, 2)]
    assert (run.pause_ms, run.worst_pause_ms, run.lag_s) == (8, 9, 3)
    (newest, uncommitted), (first, slowest), _ = run.syncs
    assert (newest.version, uncommitted, first.version) == (2, None, 1)
    assert slowest
    assert (slowest.fetch_s, slowest.stage_s, slowest.commit_ms, slowest.pause_ms) == (2, 1, 4.5, 9)


def test_what_a_replica_answers_replaces_what_was_known() -> None:
    run = folded(
        sync(0, 1100), sync(1, 9), commit("x", 1), status("x", None, state="down", error="no answer")
    ).progress()
    assert run
    (x,) = run.replicas
    assert (x.state, x.version, x.behind, x.digest_ok, x.error) == ("down", None, None, None, "no answer")
    assert math.isnan(x.versions[-1][1]), "the staircase breaks off where a replica serves nothing"


@pytest.mark.parametrize(("published", "ok"), [(A, True), (B, False), (None, None)])
def test_a_replica_is_compared_with_the_digest_that_was_published(
    published: str | None, ok: bool | None
) -> None:
    state = folded(sync(0, 1100), sync(1, 9), commit("x", 1, digest=A))
    assert state.served() == {1}
    state.digests[1] = published
    run = state.progress()
    assert run
    assert run.replicas[0].digest_ok is ok


def test_the_trainers_last_word_is_compared_too_and_training_can_go_on() -> None:
    state = folded(sync(0, 1100), DoneEvent(t=1, version=0, digest=A))
    state.digests[0] = B
    ended = state.progress()
    state.add([sync(1, 9)])
    resumed = state.progress()
    assert ended
    assert resumed
    assert (ended.done_ok, resumed.done) == (False, None)


def test_rewards_keep_their_steps_and_missing_ones_are_left_out() -> None:
    steps = [
        StepEvent(t=0, step=n, reward=r, metrics={}) for n, r in ((1, 0.5), (2, None), (3, None), (4, 0.75))
    ]
    run = folded(sync(0, 1100), *steps).progress()
    assert run
    assert run.reward == ((1, 0.5), (4, 0.75))
    assert run.reward_lately == 0.625


def test_the_staircase_of_a_stuck_replica_reaches_into_the_window() -> None:
    run = folded(
        sync(0, 1100), sync(1, 9), commit("stuck", 1), *(sync(n, 9) for n in range(2, 101))
    ).progress()
    assert run
    start = run.trainer[0][0]
    assert run.trainer[-1] == (1000, 100)
    assert run.replicas[0].versions == ((start, 1),)
    assert run.replicas[0].behind == 99


def test_a_long_curve_stays_short_and_loses_neither_its_spike_nor_its_end() -> None:
    peaks, means = Curve(peaks=True), Curve()
    for n in range(10_000):
        for curve in (peaks, means):
            curve.add(n, 100.0 if n == 7777 else 1.0 + n % 2)
    for curve in (peaks, means):
        assert POINTS // 2 <= len(curve.points()) <= POINTS + 1
        assert curve.points()[-1] == (9999, 2.0)
    assert max(peaks.points(), key=lambda point: point[1]) == (pytest.approx(7777, abs=34), 100.0)
    assert means.points()[0] == (pytest.approx(31.5), 1.5)


def test_a_short_curve_is_what_was_added() -> None:
    curve, points = Curve(), tuple((n, 3.0 * n) for n in range(POINTS))
    for x, y in points:
        curve.add(x, y)
    assert curve.points() == points


def test_a_sync_on_the_clock_ends_with_the_last_replicas_commit() -> None:
    run = folded(
        sync(0, 1100), sync(1, 30), commit("x", 1, lag_s=4, pause_ms=500), commit("y", 1, lag_s=2)
    ).progress()
    assert run
    event, slow = run.syncs[0]
    assert spans(event, slow) == [
        ("diff", 0.0, 0.1),
        ("publish", 0.1, 0.3),
        ("idle", 0.3, 0.5),
        ("fetch", 0.5, 2.5),
        ("stage", 2.5, 3.5),
        ("pause", 3.5, 4),
    ]
    assert spans(event, None) == [("diff", 0.0, 0.1), ("publish", 0.1, 0.3)]


def test_what_was_saved_adds_up_and_an_anchor_counts_against_it() -> None:
    run = folded(sync(0, 1100), sync(1, 30), sync(2, 50, anchor=1100), sync(3, 40)).progress()
    assert run
    assert run.saved == ((1, 970), (2, 820), (3, 1780))


def test_rates_and_staleness_come_from_the_steps_that_have_them() -> None:
    steps = [
        StepEvent(t=0, step=1, reward=1.0, metrics={"games/solve_rate": 0.5, "games/invalid_rate": 0.1}),
        StepEvent(t=0, step=2, reward=1.0, metrics={"sample/staleness_mean": 2.0}),
    ]
    run = folded(sync(0, 1100), *steps).progress()
    assert run
    assert (run.solved, run.invalid, run.staleness) == (((1, 0.5),), ((1, 0.1),), ((2, 2.0),))
    assert run.group is None


def test_the_newest_comparison_of_each_replica_counts_and_the_worst_comes_first() -> None:
    compared = [canary("x", 1, 2.0), canary("y", 1, 0.03), canary("x", 2, 0.02)]
    run = folded(sync(0, 1100), *compared).progress()
    assert run
    assert [(c.replica, c.version, c.alarm) for c in run.canaries] == [("y", 1, False), ("x", 2, False)]
    run = folded(sync(0, 1100), *compared, canary("x", 3, 0.6)).progress()
    assert run
    assert [(c.replica, c.alarm) for c in run.canaries] == [("x", True), ("y", False)]
