"""Ten thousand versions: what is read and what is sent stays bounded, and the ends are shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from delta_weight_sync.runlog import SEGMENT
from delta_weight_sync.store import open_bucket
from inference_space.dashboard.data import RunCache, RunView
from inference_space.dashboard.page import body, render
from inference_space.dashboard.state import FRAMES, POINTS, UNSETTLED, moments
from tests.inference_space.dashboard.test_data import until, version
from tests.support.buckets import CountedBucket
from tests.support.written_run import long

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
    return RunCache(bucket, None, pause=lambda seconds, until: threading.Event().wait())


@pytest.fixture
def view(cache: RunCache) -> RunView:
    return until(cache, lambda view: version(view) == VERSIONS, seconds=120)


def test_the_first_reading_takes_each_segment_once(bucket: CountedBucket, view: RunView) -> None:
    segments = -(-(1 + VERSIONS * 5) // SEGMENT)
    assert bucket.asked["get"] <= segments + 6, "every segment, run.json, HEAD, and the newest manifest"
    assert view.progress
    assert [(replica.status.version, replica.digest_ok) for replica in view.progress.replicas] == [
        (VERSIONS, True)
    ] * 3
    assert "v10000 serving on 3/3 replicas" in render(view)


def test_a_refresh_reads_and_sends_no_more_than_that_of_a_short_run(
    bucket: CountedBucket, cache: RunCache, view: RunView
) -> None:
    before = bucket.asked.total()
    cache._refresh()
    assert bucket.asked.total() - before <= 6
    assert len(render(view)) < 150_000
    assert view.progress
    curves = [value for value in vars(view.progress).values() if isinstance(value, tuple)]
    curves += view.progress.curves.values()
    curves += [curve for replica in view.progress.replicas for curve in (replica.versions, replica.lags)]
    assert max(map(len, curves)) <= POINTS + UNSETTLED + 1, "what a page shows does not grow with the run"


def test_looking_back_reads_nothing_of_the_log_again(
    bucket: CountedBucket, cache: RunCache, view: RunView
) -> None:
    before = bucket.asked["get"]
    pages = {one: body(cache.at(one, lambda versions: {})) for one in moments(VERSIONS)[:-1]}
    assert bucket.asked["get"] == before
    assert 1 < len(pages) <= FRAMES
    assert all(f"v{one} serving on 3/3 replicas" in page for one, page in pages.items() if one)
    assert "v0 published, no replica has reported yet" in pages[0]
