"""Ten thousand versions: what is read and what is sent stays bounded, and the ends are shown."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from delta_weight_sync.runlog import SEGMENT
from delta_weight_sync.store import Bucket, ObjectInfo, open_bucket
from inference_space.dashboard import browser as bucket_browser
from inference_space.dashboard.data import RunCache
from inference_space.dashboard.page import body, render
from inference_space.dashboard.run_state import UNSETTLED
from inference_space.dashboard.series import POINTS
from inference_space.dashboard.snapshots import FRAMES, moments
from tests.dashboard.test_data import until, version
from tests.dashboard.written_run import long

VERSIONS = 10_000
REPLICAS = ("replica-0", "replica-1", "replica-2")


class Counted:
    """A bucket that counts what is asked of it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url, self.asked = bucket, bucket.url, Counter[str]()

    def __getattr__(self, name: str):
        self.asked[name] += 1
        return getattr(self._bucket, name)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    bucket = open_bucket(f"file://{tmp_path_factory.mktemp('long')}/bucket", create=True)
    long(bucket, VERSIONS, REPLICAS)
    return Counted(bucket)


@pytest.fixture(scope="module")
def cache(long_run: Counted) -> RunCache:
    """It reads the run once, and then only when a test makes it."""
    return RunCache(long_run, None, pause=lambda seconds, until: threading.Event().wait())


def test_the_first_reading_takes_each_segment_once(long_run: Counted, cache: RunCache) -> None:
    view = until(cache, lambda view: version(view) == VERSIONS, seconds=120)
    segments = -(-(1 + VERSIONS * 5) // SEGMENT)
    assert long_run.asked["get"] <= segments + 6, "every segment, run.json, HEAD, and the newest manifest"
    assert view.progress
    assert [replica.version for replica in view.progress.replicas] == [VERSIONS] * 3
    assert [replica.digest_ok for replica in view.progress.replicas] == [True] * 3
    assert "v10000 serving on 3/3 replicas" in render(view)


def test_a_refresh_reads_and_sends_no_more_than_that_of_a_short_run(
    long_run: Counted, cache: RunCache
) -> None:
    view = until(cache, lambda view: version(view) == VERSIONS, seconds=120)
    before = sum(long_run.asked.values())
    cache._refresh()
    assert sum(long_run.asked.values()) - before <= 6
    assert len(render(view)) < 150_000
    assert view.progress
    curves = [value for value in vars(view.progress).values() if isinstance(value, tuple)]
    curves += [curve for replica in view.progress.replicas for curve in (replica.versions, replica.lags)]
    assert max(map(len, curves)) <= POINTS + UNSETTLED + 1, "what a page shows does not grow with the run"


def test_looking_back_reads_nothing_of_the_log_again(long_run: Counted, cache: RunCache) -> None:
    until(cache, lambda view: version(view) == VERSIONS, seconds=120)
    before = long_run.asked["get"]
    pages = {one: body(cache.snapshots.at(one, no_digests)) for one in moments(VERSIONS)[:-1]}
    assert long_run.asked["get"] == before
    assert 1 < len(pages) <= FRAMES
    assert all(f"v{one} serving on 3/3 replicas" in page for one, page in pages.items() if one)
    assert "v0 published, no replica has reported yet" in pages[0]


def no_digests(versions: set[int]) -> dict[int, str]:
    return {}


def test_the_bucket_browser_shows_a_page_of_it(long_run: Counted) -> None:
    objects = [
        ObjectInfo(f"runs/wordle/{kind}/{v:08d}.t1-5ad0b5d1{end}", 1000, "")
        for kind, end in (("deltas", ".safetensors"), ("manifests", ".json"))
        for v in range(1, VERSIONS + 1)
    ]
    newest = bucket_browser.listing(objects, "wordle", 0, served=True)
    oldest = bucket_browser.listing(objects, "wordle", VERSIONS // bucket_browser.PAGE - 1, served=True)
    assert len(newest) < 40_000
    assert "<b>20 MB</b> in 20000 objects" in newest
    assert "00010000.t1-5ad0b5d1.safetensors" in newest
    assert "00000001.t1-5ad0b5d1.safetensors" in oldest
