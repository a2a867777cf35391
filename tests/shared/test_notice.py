"""When a replica looks at the bucket: as seldom as the quota of its user wants, as soon as somebody knows."""

from __future__ import annotations

import threading

import pytest

from delta_weight_sync.store.notice import SAFETY_S, Notice
from delta_weight_sync.store.quota import LONGEST_BLOCK_S, Quota

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Told(Notice):
    """Of a store that tells of changes."""

    def follow(self, live: bool) -> None:
        self._set_live(live)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quota(clock: Clock) -> Quota:
    return Quota(clock)


@pytest.fixture
def notice(clock: Clock, quota: Quota) -> Told:
    return Told(quota, clock)


def looks(notice: Notice, clock: Clock, seconds: float, turn_s: float = 1.0, poll_s: float = 1.0) -> int:
    """How often a program looks that takes a turn so often."""
    count, end = 0, clock.now + seconds
    while clock.now < end:
        count += notice.due(poll_s)
        clock.now += turn_s
    return count


def test_without_news_it_looks_once_per_interval(notice: Told, clock: Clock) -> None:
    assert looks(notice, clock, 300.0) == 300
    assert looks(notice, clock, 300.0, turn_s=0.25) == 300
    assert looks(notice, clock, 300.0, poll_s=5.0) == 60


def test_a_store_that_tells_of_changes_is_looked_at_for_safety_only(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    assert looks(notice, clock, 10 * SAFETY_S) == 10
    notice.follow(live=False)
    assert looks(notice, clock, 60.0) == 60, "nobody tells any more"


def test_what_is_told_is_looked_at_in_the_same_turn_and_once_more(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    notice.tell()
    assert notice.due(1.0)
    assert not notice.due(1.0)
    assert looks(notice, clock, 10.0) == 1, "the store may show the change a moment later"


def test_after_a_look_that_failed_the_next_one_does_not_wait_for_news(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    notice.doubt()
    assert looks(notice, clock, 5.0) == 1


def test_a_store_that_should_tell_and_does_not_is_not_relied_on(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    notice.tell()
    assert notice.due(1.0)
    notice.found()
    assert notice.how(1.0) == "told by the store", "it did tell"
    clock.now += 1.0
    assert notice.due(1.0)
    notice.found()
    assert notice.how(1.0) == "told by the store", "the store showed it a little later"
    clock.now += SAFETY_S
    assert notice.due(1.0)
    notice.found()
    assert notice.how(1.0) == "looks every 1 s"


def test_pokes_bring_one_look_per_interval_however_many_they_are(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    notice.poke()
    assert notice.due(1.0), "at once"
    count = 0
    for _ in range(1000):
        notice.poke()
        count += notice.due(1.0)
        clock.now += 0.01
    assert count <= 11, "in ten seconds"


def test_pokes_at_most_double_the_requests(notice: Told, clock: Clock) -> None:
    count = 0
    for _ in range(6000):
        notice.poke()
        count += notice.due(1.0)
        clock.now += 0.05
    assert 300 <= count <= 600


def test_a_poke_that_comes_too_early_is_answered_later(notice: Told, clock: Clock) -> None:
    notice.follow(live=True)
    looks(notice, clock, 10.0)
    for _ in range(2):
        notice.poke()
        notice.due(1.0)
    assert looks(notice, clock, 3.0) == 2, "for the second poke, and once more"


@pytest.mark.parametrize("ring", [Notice.poke, Notice.tell, Notice.close])
def test_whoever_waits_is_woken(ring) -> None:
    notice = Notice()
    waiting = threading.Thread(target=notice.wait, args=(HOUR,))
    waiting.start()
    ring(notice)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_flood_of_pokes_wakes_nobody(clock: Clock) -> None:
    notice = Notice(clock=clock)
    notice.poke()
    assert notice.due(1.0)
    notice.wait(HOUR)
    for _ in range(1000):
        notice.poke()
    assert not notice._ringing
    clock.now += 1.0
    assert notice.due(1.0)


def test_news_that_nobody_looks_at_do_not_keep_it_awake(notice: Told) -> None:
    notice.tell()
    notice.wait(HOUR)
    started = threading.Event()

    def wait_again() -> None:
        started.set()
        notice.wait(HOUR)

    waiting = threading.Thread(target=wait_again)
    waiting.start()
    assert started.wait(60.0)
    waiting.join(0.05)
    assert waiting.is_alive(), "a replica that is paused sleeps between its turns"
    notice.close()
    waiting.join(60.0)


def test_a_refusal_is_waited_for_and_told(notice: Told, clock: Clock, quota: Quota) -> None:
    looks(notice, clock, 10.0)
    quota.refused(40.0)
    assert notice.how(1.0) == "not for 40 s: the store refused more requests of this token"
    assert looks(notice, clock, 40.0) == 0
    assert looks(notice, clock, 5.0) == 5


def test_a_refusal_that_names_hours_or_nothing_is_waited_for_less(clock: Clock, quota: Quota) -> None:
    quota.refused(24 * HOUR)
    assert quota.blocked_s() == LONGEST_BLOCK_S
    waits = []
    for _ in range(8):
        quota.refused(None)
        waits.append(quota.blocked_s())
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (4.0, LONGEST_BLOCK_S)


class Hub:
    """Counts requests of one user in windows of five minutes, as the real one does, and says what is left."""

    WINDOW_S = 300.0

    def __init__(self, clock: Clock, allowed: int) -> None:
        self.clock, self.allowed, self.used, self.refusals, self._window = clock, allowed, 0, 0, -1

    def ask(self, quota: Quota) -> None:
        window, into = divmod(self.clock.now, self.WINDOW_S)
        if window != self._window:
            self._window, self.used = window, 0
        self.used += 1
        if self.used > self.allowed:
            self.refusals += 1
            quota.refused(self.WINDOW_S - into)
        else:
            quota.left(self.allowed - self.used, self.WINDOW_S - into)


@pytest.mark.parametrize("replicas", [1, 16, 64, 256])
def test_replicas_of_one_free_user_share_its_quota_without_knowing_of_each_other(
    clock: Clock, replicas: int
) -> None:
    hub, quotas = Hub(clock, allowed=5000), [Quota(clock) for _ in range(replicas)]
    notices = [Notice(quota, clock) for quota in quotas]
    looked = 0
    for turn in range(600):
        for place, (notice, quota) in enumerate(zip(notices, quotas, strict=True)):
            clock.now = 1200.0 + turn + place / replicas
            if notice.due(1.0):
                hub.ask(quota)
                looked += 1
    assert hub.refusals == 0
    assert looked >= min(600 * replicas, 2 * 5000) * 0.4, "and use much of it"
    slowest = max(quota.interval(1.0) for quota in quotas)
    assert slowest == 1.0 if replicas == 1 else slowest <= 60.0
    assert notices[0].how(1.0).startswith("looks every")


def test_a_burst_of_requests_for_one_version_slows_nobody_down(clock: Clock, quota: Quota) -> None:
    for version in range(20):
        for request in range(9):
            quota.left(5000 - 9 * version - request, 300.0 - 10 * version)
        clock.now += 10.0
    assert quota.interval(1.0) == 1.0
