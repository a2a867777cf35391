"""A bucket of the Hub reports its changes, also after an interruption; else the clock decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from uuid import uuid4

import pytest

from delta_weight_sync.errors import BucketError
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.store import hub as hub_store
from delta_weight_sync.store.hub import HubNotifications
from tests.support.hubsim import HubSim

HEADS, HEAD = "runs/demo/heads/", "runs/demo/heads/00000001.json"
HOUR, PATIENCE_S = 3600.0, 60.0
FEED = "GET /api/buckets/.*/events"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next connection does not wait for seconds."""
    monkeypatch.setattr(hub_store, "_pause_s", lambda failures: 0.01)


@pytest.fixture
def bucket(hub_env: None) -> Bucket:
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}/policies", create=True)
    bucket.put(HEAD, b"version 1")
    return bucket


@pytest.fixture
def notice(bucket: Bucket) -> Iterator[HubNotifications]:
    """Connected, and nothing is new."""
    notice = bucket.notifications(HEADS)
    assert notice.due(HOUR), "no look so far"
    is_connected(notice)
    hears(notice, "what may have been missed before the first connection")
    yield notice
    notice.close()


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def is_connected(notice: HubNotifications) -> None:
    until(lambda: notice.describe(HOUR) == "notified by the store", "a connection")


def hears(notice: HubNotifications, what: str) -> None:
    """A look is due although the last one was less than an hour ago."""
    until(lambda: notice.due(HOUR), what)


def connections(hub: HubSim, bucket: Bucket) -> int:
    return sum(request == f"GET /api/buckets/{name(bucket)}/events" for request in hub.requests())


def name(bucket: Bucket) -> str:
    """Owner and name, as the Hub knows it."""
    return "/".join(bucket.url.split("/")[3:5])


def ends(notice: HubNotifications) -> None:
    until(lambda: notice.describe(1.0) == "polls every 1 s", "the end of the connection")


def test_changes_of_other_folders_do_not_wake(notice: HubNotifications, bucket: Bucket) -> None:
    other = bucket.notifications("runs/demo/log/")
    assert other.due(HOUR)
    is_connected(other)
    hears(other, "the beginning")
    bucket.put("runs/demo/log/00000000.jsonl", b"an event")
    hears(other, "the log")
    assert not notice.due(HOUR)
    bucket.put(HEAD, b"version 2")
    hears(notice, "the new version")
    assert not other.due(HOUR)
    other.close()


@pytest.mark.parametrize("politely", [True, False])
def test_the_next_connection_reports_changes_since_the_last(
    notice: HubNotifications, bucket: Bucket, hub: HubSim, politely: bool
) -> None:
    hub.fault(FEED, status=503)
    hub.end_feeds(name(bucket), politely=politely)
    ends(notice)
    bucket.put(HEAD, b"version 2")
    assert not notice.due(HOUR)
    hub.clear()
    hears(notice, "the change that was missed")


def test_a_connection_that_is_resumed_without_a_change_costs_no_look(
    notice: HubNotifications, bucket: Bucket, hub: HubSim
) -> None:
    hub.end_feeds(name(bucket), politely=True)
    until(lambda: connections(hub, bucket) == 2, "another connection")
    is_connected(notice)
    assert not notice.due(HOUR)


def test_a_cursor_that_is_too_old_causes_a_look(
    notice: HubNotifications, bucket: Bucket, hub: HubSim
) -> None:
    hub.feed(forgets=True)
    hub.end_feeds(name(bucket), politely=True)
    hears(notice, "what the feed has forgotten")
    is_connected(notice)
    bucket.put(HEAD, b"version 2")
    hears(notice, "the next change")


def test_a_refused_cursor_is_not_sent_again(notice: HubNotifications, bucket: Bucket, hub: HubSim) -> None:
    hub.fault(FEED, times=1, status=400)
    hub.end_feeds(name(bucket), politely=False)
    hears(notice, "the beginning of another connection")
    assert connections(hub, bucket) == 3


def test_a_connection_on_which_nothing_comes_is_given_up(
    notice: HubNotifications, bucket: Bucket, hub: HubSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_store, "SILENCE_S", 0.2)
    hub.feed(silent=True)
    hub.end_feeds(name(bucket), politely=False)
    until(lambda: connections(hub, bucket) >= 4, "further connections, each given up")
    hub.clear()
    bucket.put(HEAD, b"version 2")
    hears(notice, "the change")


def test_a_feed_that_reports_nothing_is_left_for_long(
    notice: HubNotifications, bucket: Bucket, hub: HubSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(notice._done, "wait", lambda seconds: pauses.append(seconds) or time.sleep(0.01))
    monkeypatch.setattr("delta_weight_sync.store._notifications.SAFETY_S", 0.0)
    hub.feed(mute=True)
    bucket.put(HEAD, b"version 2")
    until(lambda: notice.due(0.01), "once more, as the first connection reported a change")
    until(lambda: notice.due(0.01), "a look for safety")
    notice.confirm()
    until(lambda: hub_store.LONGEST_FEED_PAUSE_S in pauses, "a long pause")


@pytest.mark.parametrize(
    "fault", [{"status": status} for status in (200, 401, 403, 404, 501)] + [{"drop": True}], ids=str
)
def test_without_a_feed_the_clock_says_when_to_look(
    bucket: Bucket, hub: HubSim, fault: dict[str, object]
) -> None:
    hub.fault(FEED, **fault)  # status 200: a page in place of the feed
    notice = bucket.notifications(HEADS)
    assert notice.due(0.01)
    until(
        lambda: connections(hub, bucket) >= 2, "a feed may come yet, as that of a bucket that is made later"
    )
    until(lambda: notice.due(0.01), "the next look")
    assert notice.describe(0.01) == "polls every 0.01 s"
    notice.close()


def test_a_hub_that_asks_for_a_pause_gets_it(
    bucket: Bucket, hub: HubSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice, pauses = bucket.notifications(HEADS), []
    hub.fault(FEED, times=1, status=429, headers={"Retry-After": "44"})
    hub.fault(FEED, times=1, status=503, headers={"RateLimit": '"api";r=0;t=280'})
    hub.fault(FEED, times=1, status=429, headers={"Retry-After": "86400"})
    monkeypatch.setattr(notice._done, "wait", pauses.append)
    assert notice.due(HOUR)
    is_connected(notice)
    assert pauses[:3] == [44.0, 280.0, hub_store.LONGEST_FEED_PAUSE_S]
    notice.close()


def test_close_ends_a_silent_connection(notice: HubNotifications, hub: HubSim, bucket: Bucket) -> None:
    hub.feed(silent=True)
    bucket.put(HEAD, b"not sent")  # so that it waits without any word from now on
    notice.close()
    assert not notice._thread.is_alive()


def test_connections_end_less_and_less_often_while_they_do_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = [hub_store._pause_s(failures) for failures in range(1, 12)]
    assert 2.5 <= pauses[0] <= 5.0
    assert pauses[-1] >= hub_store.LONGEST_FEED_PAUSE_S / 2
    assert max(pauses) <= hub_store.LONGEST_FEED_PAUSE_S


def test_a_shared_quota_slows_polling_and_ends_in_a_pause(
    bucket: Bucket, hub: HubSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_weight_sync.store._notifications.MEASURED_S", 0.0)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    hub.limit(files=20)
    notice, other = bucket.notifications(HEADS), open_bucket(f"hf://buckets/{name(bucket)}/other")
    paces = []
    for _ in range(5):
        bucket.stat(HEAD)
        assert other.stat(HEAD) is None, "somebody else with this token"
        paces.append(notice.describe(1.0))
    assert "because the token's quota of requests is shared" in paces[-1]
    with pytest.raises(BucketError, match="answered 429"):
        [bucket.stat(HEAD) for _ in range(20)]
    assert notice.describe(1.0).endswith("the store refused further requests with this token")
    assert not notice.due(0.001)
    notice.close()
