"""When a replica looks at the bucket: as rarely as the quota asks, and as soon as a notification arrives."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from uuid import uuid4

import pytest

from delta_weight_sync.errors import BucketError
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.store import hub as hub_store
from delta_weight_sync.store.hub import HubNotifications
from delta_weight_sync.store.notifications import LONGEST_BLOCK_S, POKES, SAFETY_S, Notifications, Quota, Why
from tests.support.hubsim import HubSim
from tests.support.waiting import soon as until

HOUR = 3600.0


class Clock:
    now = 1000.0

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


def looks(notice, clock, seconds, turn_s=1.0, poll_s=1.0) -> int:
    """Looks of a program that takes a turn every `turn_s`."""
    count = 0
    end = clock.now + seconds
    while clock.now < end:
        count += notice.due(poll_s) is not None
        clock.now += turn_s
    return count


@pytest.fixture
def live(notice: Notifications, clock: Clock) -> Notifications:
    """Notifications of a store that reports changes, and has reported none for a while."""
    notice.rely(True)
    looks(notice, clock, 10.0)
    return notice


def test_without_news_it_looks_once_per_interval(notice, clock):
    assert looks(notice, clock, 300.0) == 300
    assert looks(notice, clock, 300.0, turn_s=0.25) == 300
    assert looks(notice, clock, 300.0, poll_s=5.0) == 60


def test_a_store_that_reports_changes_is_polled_for_safety_only(live, clock):
    assert looks(live, clock, 10 * SAFETY_S) == 10
    live.rely(False)
    assert looks(live, clock, 60.0) == 60, "no more notifications"


def test_a_notification_causes_a_look_in_the_same_turn_and_one_more(live, clock):
    live.report()
    assert live.due(1.0) is Why.NOTIFIED
    assert not live.due(1.0)
    assert looks(live, clock, 10.0) == 1, "the store may show the change a moment later"


def test_a_store_that_misses_a_notification_is_polled(live, clock):
    live.report()
    assert live.due(1.0) is Why.NOTIFIED
    clock.now += 1.0
    assert live.due(1.0) is Why.INTERVAL, "the store may show the change a little later"
    clock.now += SAFETY_S
    assert live.due(1.0) is Why.SAFETY
    live.rely(False)  # as the watcher does if this look finds a change
    assert live.describe(1.0) == "polls every 1 s"
    assert looks(live, clock, 10.0) == 9, "from the next interval on"
    live.report()
    assert live.describe(1.0) == "notified by the store", "it does again"


def test_the_first_pokes_are_answered_at_once_and_a_flood_once_per_interval(live, clock):
    for _ in range(POKES):
        live.poke()
        live.wait(HOUR)
        assert live.due(1.0), "without a wait"
    live.poke()
    live.wait(0.0)
    assert not live.due(1.0), "a flood is not answered"
    count = 0
    for _ in range(1000):
        live.poke()
        count += live.due(1.0) is not None
        clock.now += 0.01
    assert count <= 11, "in ten seconds"
    looks(live, clock, 2 * POKES)
    live.poke()
    assert live.due(1.0), "a flood is forgotten"


def test_a_poke_that_comes_late_into_an_overdue_look_ends_the_wait(notice, clock):
    notice.due(1.0)
    clock.now += 5.0  # the program was busy
    notice.poke()
    notice.wait(HOUR)
    assert notice.due(1.0) is Why.NOTIFIED


def test_a_poke_is_followed_by_one_more_look_and_a_failed_look_by_one(live, clock):
    live.poke()
    assert looks(live, clock, 5.0) == 2
    live.retry(4.0)
    assert looks(live, clock, 4.0) == 0
    assert live.due(1.0) is Why.INTERVAL
    assert looks(live, clock, 5.0) == 0


def test_what_failed_is_not_looked_at_more_often_than_the_quota_allows(notice, clock):
    assert notice.due(10.0)
    notice.retry(1.0)
    assert looks(notice, clock, 10.0, poll_s=10.0) == 0


@pytest.mark.parametrize("ring", [Notifications.poke, Notifications.report, Notifications.close])
def test_waiting_ends(ring):
    notice = Notifications()
    waiting = threading.Thread(target=notice.wait, args=(HOUR,))
    waiting.start()
    ring(notice)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_refusal_is_waited_for_and_described(notice, clock, quota):
    looks(notice, clock, 10.0)
    quota.refused(40.0)
    assert notice.describe(1.0) == "paused for 40 s: the store refused further requests with this token"
    assert looks(notice, clock, 40.0) == 0
    assert looks(notice, clock, 5.0) == 5


def test_a_refusal_that_names_hours_or_nothing_is_waited_for_less(clock, quota):
    quota.refused(24 * HOUR)
    assert quota.blocked_s() == LONGEST_BLOCK_S
    waits = []
    for _ in range(8):
        quota.refused(None)
        waits.append(quota.blocked_s())
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (4.0, LONGEST_BLOCK_S)


@pytest.mark.parametrize("replicas", [1, 16, 64, 256])
def test_replicas_of_one_user_share_its_quota(clock, replicas):
    """Of 5,000 requests in windows of five minutes, as the real Hub counts them."""
    requests = Counter[int]()
    quotas = [Quota(clock) for _ in range(replicas)]
    notices = [Notifications(quota, clock) for quota in quotas]
    for turn in range(600):
        for place, (notice, quota) in enumerate(zip(notices, quotas, strict=True)):
            clock.now = 1200.0 + turn + place / replicas
            if notice.due(1.0):
                window, into = divmod(clock.now, 300.0)
                requests[int(window)] += 1
                quota.left(5000 - requests[int(window)], 300.0 - into)
    assert max(requests.values()) <= 5000
    assert requests.total() >= min(600 * replicas, 2 * 5000) * 0.4, "and use much of it"
    slowest = max(quota.interval(1.0) for quota in quotas)
    assert slowest == 1.0 if replicas == 1 else slowest <= 60.0
    assert notices[0].describe(1.0).startswith("polls every")


def test_a_burst_of_requests_for_one_version_does_not_slow_polling(clock, quota):
    for version in range(20):
        for request in range(9):
            quota.left(5000 - 9 * version - request, 300.0 - 10 * version)
        clock.now += 10.0
    assert quota.interval(1.0) == 1.0


HEADS = "runs/demo/heads/"
HEAD = "runs/demo/heads/00000001.json"
FEED = "GET /api/buckets/.*/events"


@pytest.fixture
def bucket(hub_env: None, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of the Hub with a version. A broken connection is replaced within moments."""
    monkeypatch.setattr(hub_store, "_pause_s", lambda failures: 0.01)
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}/policies", create=True)
    bucket.put(HEAD, b"version 1")
    return bucket


@pytest.fixture
def feed(bucket: Bucket) -> Iterator[HubNotifications]:
    """Connected, and nothing is new."""
    feed = bucket.notifications(HEADS)
    assert feed.due(HOUR), "no look so far"
    is_connected(feed)
    hears(feed, "what may have been missed before the first connection")
    yield feed
    feed.close()


def is_connected(feed: HubNotifications) -> None:
    until(lambda: feed.describe(HOUR) == "notified by the store", "a connection")


def hears(feed: HubNotifications, what: str) -> None:
    """A look is due although the last one was less than an hour ago."""
    until(lambda: feed.due(HOUR), what)


def connections(hub: HubSim, bucket: Bucket) -> int:
    return sum(request == f"GET /api/buckets/{name(bucket)}/events" for request in hub.requests())


def name(bucket: Bucket) -> str:
    """Owner and name, as the Hub knows it."""
    return "/".join(bucket.url.split("/")[3:5])


def test_changes_of_other_folders_do_not_wake(feed, bucket):
    other = open_bucket(f"hf://buckets/{name(bucket)}").notifications("policies/runs/demo/log/")
    assert other.due(HOUR)
    is_connected(other)
    hears(other, "the beginning")
    bucket.put("runs/demo/log/00000001.0.00000000.jsonl.zst", b"an event")
    hears(other, "the log")
    assert not feed.due(HOUR)
    bucket.put(HEAD, b"version 2")
    hears(feed, "the new version")
    assert not other.due(HOUR)
    other.close()


@pytest.mark.parametrize("politely", [True, False])
def test_the_next_connection_reports_changes_since_the_last(feed, bucket, hub, politely):
    hub.fault(FEED, status=503)
    hub.end_feeds(name(bucket), politely=politely)
    until(lambda: feed.describe(1.0) == "polls every 1 s", "the end of the connection")
    bucket.put(HEAD, b"version 2")
    assert not feed.due(HOUR)
    hub.clear()
    hears(feed, "the change that was missed")


def test_a_connection_that_is_resumed_without_a_change_costs_no_look(feed, bucket, hub):
    hub.end_feeds(name(bucket), politely=True)
    until(lambda: connections(hub, bucket) == 2, "another connection")
    is_connected(feed)
    assert not feed.due(HOUR)


def test_a_cursor_that_is_too_old_causes_a_look(feed, bucket, hub):
    hub.feed(forgets=True)
    hub.end_feeds(name(bucket), politely=True)
    hears(feed, "what the feed has forgotten")
    is_connected(feed)
    bucket.put(HEAD, b"version 2")
    hears(feed, "the next change")


def test_a_refused_cursor_is_not_sent_again(feed, bucket, hub):
    hub.fault(FEED, times=1, status=400)
    hub.end_feeds(name(bucket), politely=False)
    hears(feed, "the beginning of another connection")
    assert connections(hub, bucket) == 3


def test_a_connection_on_which_nothing_comes_is_given_up(feed, bucket, hub, monkeypatch):
    monkeypatch.setattr(hub_store, "SILENCE_S", 0.2)
    hub.feed(silent=True)
    hub.end_feeds(name(bucket), politely=False)
    until(lambda: connections(hub, bucket) >= 4, "further connections, each given up")
    hub.clear()
    bucket.put(HEAD, b"version 2")
    hears(feed, "the change")


@pytest.mark.parametrize(
    "fault", [{"status": status} for status in (200, 401, 403, 404, 501)] + [{"drop": True}], ids=str
)
def test_without_a_feed_the_clock_says_when_to_look(bucket, hub, fault):
    hub.fault(FEED, **fault)  # status 200: a page in place of the feed
    feed = bucket.notifications(HEADS)
    assert feed.due(0.01)
    until(lambda: connections(hub, bucket) >= 2, "the feed of a bucket that is made later")
    until(lambda: feed.due(0.01), "the next look")
    assert feed.describe(0.01) == "polls every 0.01 s"
    feed.close()


def test_a_hub_that_asks_for_a_pause_gets_it(bucket, hub, monkeypatch):
    feed = bucket.notifications(HEADS)
    pauses = []
    hub.fault(FEED, times=1, status=429, headers={"Retry-After": "44"})
    hub.fault(FEED, times=1, status=503, headers={"RateLimit": '"api";r=0;t=280'})
    hub.fault(FEED, times=1, status=429, headers={"Retry-After": "86400"})
    monkeypatch.setattr(feed._done, "wait", pauses.append)
    assert feed.due(HOUR)
    is_connected(feed)
    assert pauses[:3] == [44.0, 280.0, hub_store.LONGEST_FEED_PAUSE_S]
    feed.close()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_the_stream_is_divided(size):
    stream = (
        b': hello\n\nevent: ready\ndata: {"cursor": "1"}\n\n:\n\nevent: changes\r\ndata: {"path":\r\n'
        b'data: "\xe2\x80\xa8"}\r\nid: 7\r\n\r\ndata: 1\n\nevent: nothing\n\nevent: cut off\ndata: {}'
    )
    chunks = (stream[at : at + size] for at in range(0, len(stream), size))
    events = [(name, json.loads(data)) for name, data in hub_store._events(chunks)]
    assert events == [("ready", {"cursor": "1"}), ("changes", {"path": "\u2028"}), ("message", 1)]


def test_close_ends_a_silent_connection(feed, hub, bucket):
    hub.feed(silent=True)
    bucket.put(HEAD, b"not sent")  # so that it waits without any word from now on
    feed.close()
    assert not feed._thread.is_alive()


def test_connections_end_less_and_less_often_while_they_do_not_last():
    first, *_, last = (hub_store._pause_s(failures) for failures in range(1, 12))
    assert 2.5 <= first <= 5.0
    assert hub_store.LONGEST_FEED_PAUSE_S / 2 <= last <= hub_store.LONGEST_FEED_PAUSE_S


def test_a_shared_quota_slows_polling_and_ends_in_a_pause(bucket, hub, monkeypatch):
    monkeypatch.setattr("delta_weight_sync.store.notifications.MEASURED_S", 0.0)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    hub.limit(files=20, window_s=1e6)
    feed = bucket.notifications(HEADS)
    other = open_bucket(f"hf://buckets/{name(bucket)}/other")
    paces = []
    for _ in range(5):
        bucket.stat(HEAD)
        assert other.stat(HEAD) is None, "somebody else with this token"
        paces.append(feed.describe(1.0))
    assert "so that the token's quota of requests lasts" in paces[-1]
    with pytest.raises(BucketError, match="answered 429"):
        [bucket.stat(HEAD) for _ in range(20)]
    assert feed.describe(1.0).endswith("the store refused further requests with this token")
    assert not feed.due(0.001)
    feed.close()
