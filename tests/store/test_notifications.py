"""When a replica looks at the bucket: as rarely as the quota asks, and as soon as a notification arrives."""

from __future__ import annotations

import threading

import pytest

from delta_weight_sync.store._notifications import LONGEST_BLOCK_S, SAFETY_S, Notifications, Quota

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quota(clock: Clock) -> Quota:
    return Quota(clock)


@pytest.fixture
def notice(clock: Clock, quota: Quota) -> Notifications:
    return Notifications(quota, clock)


def looks(
    notice: Notifications, clock: Clock, seconds: float, turn_s: float = 1.0, poll_s: float = 1.0
) -> int:
    """Looks of a program that takes a turn every `turn_s`."""
    count, end = 0, clock.now + seconds
    while clock.now < end:
        count += notice.due(poll_s)
        clock.now += turn_s
    return count


@pytest.fixture
def live(notice: Notifications, clock: Clock) -> Notifications:
    """Of a store that reports changes, and has reported none for a while."""
    notice._set_live(True)
    looks(notice, clock, 10.0)
    return notice


def test_without_news_it_looks_once_per_interval(notice: Notifications, clock: Clock) -> None:
    assert looks(notice, clock, 300.0) == 300
    assert looks(notice, clock, 300.0, turn_s=0.25) == 300
    assert looks(notice, clock, 300.0, poll_s=5.0) == 60


def test_a_store_that_reports_changes_is_polled_for_safety_only(live: Notifications, clock: Clock) -> None:
    assert looks(live, clock, 10 * SAFETY_S) == 10
    live._set_live(False)
    assert looks(live, clock, 60.0) == 60, "no more notifications"


def test_a_notification_causes_a_look_in_the_same_turn_and_one_more(
    live: Notifications, clock: Clock
) -> None:
    live.wake()
    assert live.due(1.0)
    assert not live.due(1.0)
    assert looks(live, clock, 10.0) == 1, "the store may show the change a moment later"


def test_after_a_look_that_failed_the_next_one_does_not_wait_for_news(
    live: Notifications, clock: Clock
) -> None:
    live.distrust()
    assert looks(live, clock, 5.0) == 1


def test_a_store_that_misses_a_notification_is_polled(live: Notifications, clock: Clock) -> None:
    live.wake()
    assert live.due(1.0)
    live.confirm()
    assert live.describe(1.0) == "notified by the store", "it did notify"
    clock.now += 1.0
    assert live.due(1.0)
    live.confirm()
    assert live.describe(1.0) == "notified by the store", "the store showed it a little later"
    clock.now += SAFETY_S
    assert live.due(1.0)
    live.confirm()
    assert live.describe(1.0) == "polls every 1 s"


def test_pokes_bring_one_look_per_interval_however_many_they_are(live: Notifications, clock: Clock) -> None:
    live.poke()
    assert live.due(1.0), "without a wait"
    count = 0
    for _ in range(1000):
        live.poke()
        count += live.due(1.0)
        clock.now += 0.01
    assert count <= 11, "in ten seconds"


def test_a_poke_that_comes_too_early_is_answered_later(live: Notifications, clock: Clock) -> None:
    for _ in range(2):
        live.poke()
        live.due(1.0)
    assert looks(live, clock, 3.0) == 2, "for the second poke, and once more"


@pytest.mark.parametrize("ring", [Notifications.poke, Notifications.wake, Notifications.close])
def test_waiting_ends(ring) -> None:
    notice = Notifications()
    waiting = threading.Thread(target=notice.wait, args=(HOUR,))
    waiting.start()
    ring(notice)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_flood_of_pokes_does_not_wake(clock: Clock) -> None:
    notice = Notifications(clock=clock)
    notice.poke()
    assert notice.due(1.0)
    notice.wait(HOUR)
    for _ in range(1000):
        notice.poke()
    assert not notice._awake
    clock.now += 1.0
    assert notice.due(1.0)


def test_a_refusal_is_waited_for_and_described(notice: Notifications, clock: Clock, quota: Quota) -> None:
    looks(notice, clock, 10.0)
    quota.refused(40.0)
    assert notice.describe(1.0) == "paused for 40 s: the store refused further requests with this token"
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
def test_replicas_of_one_user_share_its_quota(clock: Clock, replicas: int) -> None:
    hub, quotas = Hub(clock, allowed=5000), [Quota(clock) for _ in range(replicas)]
    notices = [Notifications(quota, clock) for quota in quotas]
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
    assert notices[0].describe(1.0).startswith("polls every")


def test_a_burst_of_requests_for_one_version_does_not_slow_polling(clock: Clock, quota: Quota) -> None:
    for version in range(20):
        for request in range(9):
            quota.left(5000 - 9 * version - request, 300.0 - 10 * version)
        clock.now += 10.0
    assert quota.interval(1.0) == 1.0
