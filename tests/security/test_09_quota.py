"""What visitors make the dashboard ask of the Hub: the owner's quota is for replicas and the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from uuid import uuid4

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.data import RunCache
from inference_space.dashboard.library import Library
from inference_space.dashboard.rations import CALLS, Rationed
from inference_space.dashboard.routes import router
from tests.dashboard.real_run import RealRun
from tests.dashboard.test_data import Pauses
from tests.hubsim import HubSim

FREE = 1000  # requests to the API that a free user has in five minutes
OBJECTS = 300


@pytest.fixture
def bucket(hub: HubSim, hub_env: None) -> Bucket:
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
    run = RealRun(bucket, run="r", layers=1, width=4)
    run.step()
    run.close()
    return bucket


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def visitor(bucket: Bucket, pauses: Pauses) -> Iterator[TestClient]:
    """The dashboard's routes; its own reader has read the run once, and pauses."""
    cache, app = RunCache(bucket, None, pauses), FastAPI()
    pauses.begun()
    rationed = Rationed(bucket, lambda: 0.0)  # no time passes: what is used up stays so
    app.include_router(router(cache, Library(rationed, lambda: "r", lambda: 0.0)))
    with TestClient(app) as visitor:
        yield visitor


class Asked:
    """The requests that the Hub gets inside of a block, by kind: its API's have the smaller quota."""

    def __init__(self, hub: HubSim) -> None:
        self._hub = hub

    def __enter__(self) -> Asked:
        self._before = len(self._hub.requests())
        return self

    def __exit__(self, *_: object) -> None:
        made = self._hub.requests()[self._before :]
        kinds = Counter("api" if "/api/" in request else "other" for request in made)
        self.api, self.all = kinds["api"], kinds.total()


def test_one_object_is_downloaded_once(bucket: Bucket, hub: HubSim, visitor: TestClient) -> None:
    key = bucket.list("runs/r/heads/")[0].key
    with Asked(hub) as asked:
        answers = [visitor.get("/dashboard/object", params={"key": key}) for _ in range(40)]
    assert {answer.content for answer in answers} == {bucket.get(key)}
    assert asked.all < 12


def test_many_objects_cost_what_is_allotted(bucket: Bucket, hub: HubSim, visitor: TestClient) -> None:
    """Whatever is asked for, most of the quota is left; the page says so, and is whole when there is more."""
    files = [(b"%d" % number, f"runs/r/x/{number}") for number in range(OBJECTS)]
    bucket._api.batch_bucket_files(bucket._id, add=files)
    with Asked(hub) as asked:
        answers = [visitor.get(f"/dashboard/object?key={key}") for _, key in files]
    assert [answer.status_code for answer in answers[:100]] == [200] * 100
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) >= OBJECTS - CALLS
    assert {answer.status_code for answer in refused} == {429}
    assert "visitors have used the 240 requests" in refused[0].text
    assert asked.api < FREE * 0.6
    assert visitor.get("/dashboard/bucket").status_code == 200


def look(visitor: TestClient, pauses: Pauses, times: int) -> None:
    """The page is open while the dashboard reads the bucket so often."""
    for _ in range(times):
        visitor.get("/dashboard/explain")
        pauses.end()
        pauses.begun()


def test_a_page_that_is_open_costs_no_requests_to_the_api(
    bucket: Bucket, hub: HubSim, visitor: TestClient, pauses: Pauses
) -> None:
    for _ in range(2):
        pauses.end()
        pauses.begun()
    with Asked(hub) as asked:
        look(visitor, pauses, 10)
    assert asked.api == 0
    assert asked.all <= 30


def test_a_replica_on_a_version_that_never_was_is_not_looked_up_for_ever(
    bucket: Bucket, hub: HubSim, visitor: TestClient, pauses: Pauses
) -> None:
    run = bucket.get("runs/r/log/00000000.jsonl")
    bucket.put("runs/r/log/00000000.jsonl", run.replace(b'"version":1,', b'"version":99,'))
    look(visitor, pauses, 30)
    with Asked(hub) as asked:
        look(visitor, pauses, 10)
    assert asked.api == 0
