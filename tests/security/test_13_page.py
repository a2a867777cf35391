"""Finding 13: the page does not go back where the store shows an old HEAD."""

from __future__ import annotations

from delta_weight_sync.store import open_bucket
from inference_space.dashboard.data import RunCache
from tests.dashboard.real_run import RealRun
from tests.dashboard.test_data import until, version
from tests.dashboard.test_long_run import Counted


def test_one_stale_read_moves_no_page_back(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("inference_space.dashboard.data.EVERY_S", 0.02)
    bucket = Counted(open_bucket(f"file://{tmp_path}/page", create=True))
    run = RealRun(bucket._bucket, layers=1)
    (head,) = (info.key for info in bucket.list("runs/real/heads/"))
    old = bucket.get(head)
    run.step()
    run.step()
    cache = RunCache(bucket, None)
    until(cache, lambda view: version(view) == 2 and all(r.digest_ok for r in view.progress.replicas))
    bucket.put(head, old)
    looked = bucket.asked["stat"] + 10
    view = until(cache, lambda view: bucket.asked["stat"] > looked)
    assert (version(view), [replica.digest_ok for replica in view.progress.replicas]) == (2, [True])
    run.close()
