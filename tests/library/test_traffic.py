"""The sums of what programs report: nothing counted twice, none believed about another, memory bounded."""

import random

from delta_weight_sync.runlog import TrafficEvent
from delta_weight_sync.traffic import _PROGRAMS, _SILENT_S, TrafficSum


def trainer(source: str, version: int | None, *, t: float = 0.0, **sent: int) -> TrafficEvent:
    return TrafficEvent(t=t, source=source, since=1.0, trainer=True, version=version, sent=sent)


def replica(name: str, received: int, *, t: float = 0.0) -> TrafficEvent:
    return TrafficEvent(t=t, source=name, since=1.0, received={"deltas": received}, requests={"polls": 1})


def summed(*events: TrafficEvent) -> TrafficSum:
    programs = TrafficSum()
    for event in events:
        programs.add(event)
    return programs


def test_only_what_was_sent_after_version_0_counts_for_each_trainer() -> None:
    """The second trainer also opens the run at version 0."""
    traffic = summed(
        trainer("a", 0, anchors=1_000_000, manifests=10),
        trainer("b", 0, heads=5),
        trainer("a", 3, anchors=1_000_000, manifests=40, deltas=300),
        trainer("b", 4, heads=7, deltas=100),
        trainer("c", None, heads=3),
    ).total()
    assert traffic.sent == {"manifests": 30, "deltas": 400, "heads": 2}


def test_events_that_come_twice_or_out_of_order_change_nothing() -> None:
    events = [trainer("a", version, deltas=10 * version) for version in range(10)]
    events += [replica("x", 7 * version) for version in range(10)]
    twice = [*events, *events]
    random.Random(0).shuffle(twice)
    traffic = summed(*twice).total()
    assert traffic.sent == {"deltas": 90}
    assert traffic.received == {"deltas": 63}
    assert traffic.replica_requests == {"polls": 1}


def test_more_programs_than_are_kept_at_a_time_are_counted_once_each() -> None:
    """Replicas restart for weeks while one trainer goes on; each restart is a program of its own."""
    programs = TrafficSum()
    restarts = 3 * _PROGRAMS
    for number in range(restarts):
        t = number * _SILENT_S / 100
        programs.add(replica(f"r{number}", 5, t=t))
        programs.add(replica(f"r{number}", 10, t=t))
        programs.add(trainer("a", number + 1, t=t, deltas=number + 1))
    traffic = programs.total()
    assert traffic.received == {"deltas": 10 * restarts}
    assert traffic.sent == {"deltas": restarts}
    assert len(programs._programs) <= _PROGRAMS


def test_programs_beyond_the_limit_do_not_disturb_the_others() -> None:
    programs = summed(trainer("a", 1, deltas=1))
    for version in range(1, 4):
        for number in range(2 * _PROGRAMS):
            programs.add(replica(f"r{number}", 10 * version, t=version))
    programs.add(trainer("a", 2, t=4.0, deltas=9))
    traffic = programs.total()
    assert traffic.sent == {"deltas": 9}
    assert traffic.received == {"deltas": 30 * (_PROGRAMS - 1)}


def test_kinds_that_no_store_counts_are_left_out() -> None:
    traffic = summed(trainer("a", 1, deltas=1, surprises=10**12)).total()
    assert traffic.sent == {"deltas": 1}
    assert traffic.sent_bytes == 1
