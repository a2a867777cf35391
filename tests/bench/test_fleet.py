"""The simulator of fleets: its clients make the requests of the real ones; its lags are those measured."""

import contextlib
import os
import re
import time
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from bench import demo
from bench.fleet.__main__ import STANDARD, Figures
from bench.fleet.clock import Clock, Pipe
from bench.fleet.hub import Limits, Link, SimBucket, StandIn
from bench.fleet.machines import Fleet, Region, Scenario
from bench.hub import POLICY
from bench.results import read
from delta_weight_sync.cost import Plan, Question
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import AnchorRef
from delta_weight_sync.store import DIRECT, open_bucket
from delta_weight_sync.watch import Watcher
from tests.support.hubsim import HubSim

HUB = read()["hub"]
SMALL = Scenario(HUB["weights"], 0.01, replicas=2, step_s=3, minutes=3, link=1e9, event_s=0.0)
# Processor time of a follower per version: of 16 in one process, by psutil while `bench.hub` measured them.
FOLLOWER_S = 0.0132
# A reader takes a delta in three ways; the last has three blocks.
SIZES = (1000, 9 << 20, 20 << 20, 150 << 20)
KIND = re.compile(
    r"(\w+) (?:(/api/buckets/)team/\w+(/[\w-]+)|(/buckets/|/cas-bridge/)|(/cas/(?:v\d/)?[\w-]+)).*"
)


def kind(request):
    """A request of the simulated Hub, as the simulator names it."""
    if not (found := KIND.fullmatch(request)):
        return request
    method, api, what, files, storage = found.groups()
    return f"{method} {api}...{what}" if api else f"{method} {files}..." if files else f"{method} {storage}"


def life(bucket, other, content, folder, counted):
    """What a writer and a reader of two machines do; yields how it is counted."""
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        file.write(content(100))
    writer = RunWriter(bucket, "r", model="none", assets=None)
    first = AnchorRef(version=0, files=writer.put_weights(0, [weights]))
    writer.commit([], first, digest="0" * 16, sync=0, total=10, full_bytes=20, created_at=time.time())
    yield "opened", counted()
    reader = RunReader(other, "r")
    watcher = Watcher(reader)
    assert watcher.poll()
    watcher.mark_used()
    yield "joined", counted()
    for version, size in enumerate(SIZES, 1):
        delta = writer.put_delta(version, content(size), 1)
        writer.commit(
            [delta], None, digest="0" * 16, sync=version, total=10, full_bytes=20, created_at=time.time()
        )
        yield f"published {size}", counted()
        manifest = watcher.poll()
        watcher.mark_used()
        reader.fetch(manifest.deltas[-1], folder / "fetched")
        yield f"took {size}", counted()
    writer.put_jump(0, 4, content(20 << 20), 1)
    bucket.list("runs/r/")
    bucket.delete(["runs/r/run.json"])
    yield "jump, list, delete", counted()


def since(requests):
    """A function that counts the requests since its last call."""
    seen = Counter()

    def counted():
        nonlocal seen
        before = seen
        seen = Counter(requests())
        return dict(seen - before)

    return counted


@pytest.mark.full
def test_simulated_clients_make_the_requests_of_the_real_ones(tmp_path, monkeypatch):
    with HubSim(tmp_path / "hub") as hub:
        for name, value in hub.env(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        buckets = [open_bucket("hf://buckets/team/fleet", create=True) for _ in range(2)]
        counted = since(lambda: map(kind, hub.requests()))
        counted()
        real = dict(life(*buckets, os.urandom, tmp_path, counted))

    fleet = Fleet(SMALL)
    found = {}
    link = Link(0.1, Pipe(fleet.clock, 1e9))
    buckets = [SimBucket(fleet.hub, link, role) for role in ("trainer", "replica")]

    counted = since(lambda: (name for _, name in fleet.hub.kinds.elements()))

    def content(size):
        return StandIn.of(f"{size}".encode(), size)

    with contextlib.ExitStack() as stack:
        for module, names in fleet.simulated().items():
            stack.enter_context(mock.patch.multiple(module, **names))
        fleet.clock.spawn(lambda: found.update(life(*buckets, content, tmp_path, counted)))
        fleet.clock.run()
    assert found == real


@pytest.mark.full
@pytest.mark.parametrize(("followers", "way"), [(1, "events"), (1, "polling"), (16, "events")])
def test_lags_and_requests_are_those_measured(followers, way):
    measured = HUB["latencies"]["0.1"]
    published = measured["hand-over to HEAD"]
    taken = measured[f"HEAD to staged, {followers} follower{'s' if followers > 1 else ''}, {way}"]
    request_s = published["seconds"] / published["in_turn"]  # with what the client itself does for it
    asked = replace(SMALL, replicas=followers, minutes=10, step_s=3.1, assets=POLICY, events=way == "events")
    asked = replace(asked, latency=request_s, regions=(Region(request_s, 1e9),))
    if followers > 1:  # they were threads of one process
        asked = replace(asked, core_s=FOLLOWER_S / taken["requests"])
    some = Figures(Fleet(asked).run())
    kinds = Counter()
    for (role, name), count in some.fleet.hub.kinds.items():
        kinds[name] += count / some.versions / followers if role == "replica" else 0
    for name in ("GET /buckets/...", "GET /cas-bridge/..."):
        assert kinds[name] == pytest.approx(taken["kinds"][name], abs=0.05)
    after_head = request_s  # whether another trainer took over
    lag = some.p95 if followers > 1 else some.lag  # measured: until the last follower has staged
    assert lag == pytest.approx(published["seconds"] - after_head + taken["seconds"], rel=0.2)


@pytest.mark.full
def test_the_lag_of_a_demo_is_the_measured_one():
    measured = read()["demo"]
    assert demo.simulate(measured).lag == pytest.approx(measured["lag_s"]["median"], rel=0.2)


@pytest.mark.full
def test_a_seed_gives_the_same_run_again():
    lossy = replace(SMALL, lost=0.2, event_s=0.5, deaths_hour=60)
    first, again = (Fleet(lossy).run() for _ in range(2))
    assert first.lags == again.lags
    assert first.hub.kinds == again.hub.kinds
    assert first.lags != Fleet(replace(lossy, seed=1)).run().lags


def test_a_publisher_that_is_slower_than_the_steps_merges_them():
    one = Figures(Fleet(replace(SMALL, latency=2.0, minutes=10)).run())
    assert one.merged > 2
    assert one.breaks(Limits())[0][1].startswith("the publisher is slower than the steps")


@pytest.mark.full
def test_replicas_return_after_an_outage_and_after_a_death():
    plain, down = (Fleet(replace(SMALL, minutes=10, outage=out)).run() for out in (None, (3, 120)))
    assert max(plain.lags) < 3
    assert 120 < max(down.lags) < 240
    assert down.lags[-1] < 3
    died = Fleet(replace(SMALL, minutes=10, deaths_hour=60)).run()
    assert died.joins
    assert max(died.joins) < 20


@pytest.mark.full
def test_replicas_without_events_stay_below_an_enforced_limit():
    asked = replace(SMALL, replicas=20, minutes=15, step_s=30, events=False)
    free = Figures(Fleet(asked).run())
    assert free.peak["files"] > 5000
    limited = Figures(Fleet(replace(asked, limits=Limits(5000, 1000))).run())
    assert limited.peak["files"] < 5000
    assert limited.lag > free.lag


def test_each_rank_publishes_a_part_and_plan_predicts_lag_and_requests():
    asked = replace(
        SMALL, params=8 * 10**9, ranks=12, replicas=4, step_s=60, minutes=20, cores=8, events=False
    )
    one = Figures(Fleet(asked).run())
    parts = one.fleet.versions[-1].delta
    assert (len(parts), asked.machines) == (12, 2)
    assert sum(part.size for part in parts) == pytest.approx(asked.delta_bytes(1), rel=0.01)
    plan = Plan(Question(8 * 10**9, 0.01, 4, 1e9, steps_per_hour=60, cores=8, ranks=12))
    assert one.lag == pytest.approx(plan.hand_over_to_serving_s, rel=0.1)
    batches = one.fleet.hub.kinds["trainer", "POST /api/buckets/.../batch"]
    assert one.versions <= batches < 4 * one.versions, "one for all parts; jumps and the log, too"
    taken = one.fleet.hub.kinds["replica", "GET /cas/v2/reconstructions"] / 4 / one.versions
    assert taken == pytest.approx(12, rel=0.05) if parts[0].size > DIRECT else taken == 0
    alone = Figures(Fleet(replace(asked, ranks=1)).run())
    assert alone.lag > 1.3 * one.lag
    assert alone.fleet.versions[-1].delta[0].size > DIRECT


@pytest.mark.full
def test_a_trillion_weights_are_served_within_ten_seconds_and_catch_up_within_five_minutes():
    """As planned and as simulated: 64 ranks, 32 replicas of 16 workers, links of 16 GB/s."""
    asked = replace(STANDARD["10^12, links of 16 GB/s", "Team"], minutes=10)
    assert (asked.ranks, asked.replicas, asked.workers, asked.share) == (64, 32, 16, 0.01)
    plan = Plan(Question(10**12, 0.01, 32, 16e9, cores=asked.cores, ranks=64, workers=16))
    assert plan.hand_over_to_serving_s < 10
    assert plan.behind_s < 300
    assert Figures(Fleet(asked).run()).lag == pytest.approx(plan.hand_over_to_serving_s, rel=0.1)


def test_ranks_publish_in_step_while_the_store_is_down_and_steps_are_merged():
    slow = replace(SMALL, ranks=3, latency=2.0, minutes=10, outage=(3, 120))
    one = Figures(Fleet(slow).run())
    assert one.merged > 2
    assert {len(manifest.delta) for manifest in one.fleet.versions} == {3}
    assert 120 < max(one.fleet.lags) < 240
    assert one.fleet.lags[-1] < 30


def test_a_condition_is_held_until_its_holder_waits():
    clock = Clock()
    said = list[str]()
    condition = clock.threading.Condition()

    def first():
        with condition, condition:
            clock.sleep(1)
            said.append("first")
            condition.wait_for(lambda: "second" in said)
            clock.sleep(1)
            said.append("first again")

    def second():
        with condition:
            said.append("second")
            condition.notify_all()
            clock.sleep(1)
            said.append("second again")

    for work in (first, second):
        clock.spawn(work)
    clock.run()
    assert said == ["first", "second", "second again", "first again"]
    assert clock.now == 3


def test_transfers_share_a_pipe():
    clock = Clock()
    ended = {}
    pipe = Pipe(clock, rate=100, each=80)

    def transfer(name, start, size):
        clock.sleep(start)
        pipe.send(size)
        ended[name] = clock.now

    for name, start, size in (("first", 0, 180), ("second", 1, 50)):
        clock.spawn(lambda name=name, start=start, size=size: transfer(name, start, size))
    clock.run()
    assert ended == {"first": pytest.approx(2 + 50 / 80), "second": pytest.approx(2)}
