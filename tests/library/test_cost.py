"""The cost model against what was measured here, and against the rules of the program."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from delta_weight_sync import Publisher, codec, cost, store
from delta_weight_sync.cost import Plan, Question, RunFiles
from delta_weight_sync.errors import ObjectMissingError, ProtocolError
from delta_weight_sync.publish.writer import PartWriter, RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import ANCHOR_PAYS, MAX_FILES, AnchorRef, DeltaRef, FileRef
from delta_weight_sync.runlog import StepEvent
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.store.ledger import total
from delta_weight_sync.store.notifications import Why
from delta_weight_sync.watch import Watcher
from tests.cli.command import command
from tests.support.hubsim import HubSim
from tests.support.parted import parted
from tests.support.real_run import RUN, Drifting
from tests.support.waiting import PATIENCE_S

MEASURED = json.loads((Path(__file__).parents[2] / "bench" / "results.json").read_text())
TRAINERS = {"fp32 master, late": "fp32", "fp32 master, from bf16": "fp32-start", "bf16 weights": "bf16"}
SETS = [(s["model"], TRAINERS[s["trainer"]], s) for s in MEASURED["size"]["sets"]]
GROWTH = [*MEASURED["growth"]["changes"], *MEASURED["growth"]["size"]]
SIZE_TOLERANCE = 0.05
TIME_FACTOR = 2.0
TABLE_TOLERANCE = 0.01
POLL = {"all": 1, "api": 0, "files": 1}  # requests of a poll of HEAD


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize(("name", "trainer", "one"), SETS)
def test_sizes_of_every_measured_set(name, trainer, one, encoding):
    predicted = cost.delta_bytes(one["elements"], one["share"], encoding, trainer)
    assert predicted == pytest.approx(one["bytes"][encoding], rel=SIZE_TOLERANCE)


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("one", GROWTH, ids=lambda o: f"{o['elements'] / 1e6:.0f}M-{o['share']:.2%}")
def test_sizes_and_seconds_as_model_and_changes_grow(one, encoding):
    weights = one["elements"]
    changes = one["changed"]
    size = cost.delta_bytes(weights, one["share"], encoding, "fp32")
    assert size / changes == pytest.approx(one["per_change"][encoding], rel=SIZE_TOLERANCE)
    assert_time(cost.encode_s(weights, changes, encoding), one["parts"][f"encode {encoding}"]["median_s"])
    decode = cost.DECODE[encoding].seconds(weights, changes)
    assert_time(decode, one["parts"][f"decode {encoding}"]["median_s"])


def assert_time(predicted: float, measured: float) -> None:
    assert measured / TIME_FACTOR < predicted < measured * TIME_FACTOR


def test_the_other_parts_of_a_sync():
    section = MEASURED["speed"]
    weights = section["elements"]
    changes = section["changed"]
    costs = {"digest": cost.DIGEST, "stage": cost.PLACE, "commit": cost.COMMIT, "apply small": cost.APPLY}
    costs |= {"publish whole": cost.SAVE, "receive whole": cost.LOAD}
    costs |= {"diff fp32": cost.DIFF["fp32"], "diff bf16": cost.DIFF["bf16"]}
    for part, rate in costs.items():
        assert_time(rate.seconds(weights, changes), section["parts"][part]["median_s"])


def test_the_parts_of_a_live_replica():
    """vLLM on the CPU with requests in flight. Its machine is faster than that of the other sections."""
    live = MEASURED["live"]
    weights = live["elements"]
    changes = live["changed"]
    stage = sum(rate.seconds(weights, changes) for rate in (cost.DECODE["fast"], cost.DIGEST, cost.PLACE))
    assert live["commits"]["our stage"]["median_s"] < stage
    pauses = [1e-3 * syncs["pause_ms"]["p50"] for syncs in live["syncs"].values()]
    assert max(live["commits"]["ours"]["median_s"], *pauses) < cost.COMMIT.seconds(weights, changes)


def test_the_table_of_sizes_is_what_bench_measured():
    """Copy a new measurement that differs to delta_weight_sync/sizes.json."""
    rows = [(row["share"], row["per_change"]) for row in MEASURED["growth"]["changes"]]
    for row, expected in zip(zip(*cost.SIZES["fp32"], strict=True), rows, strict=True):
        assert_sizes(row, *expected)
    for trainer in ("fp32-start", "bf16"):
        found = [one for _, kind, one in SETS if kind == trainer][-1]
        nearest = min(zip(*cost.SIZES[trainer], strict=True), key=lambda row: abs(row[0] - found["share"]))
        assert_sizes(nearest, found["share"], found["per_change"])


def assert_sizes(row: tuple[float, ...], share: float, measured: dict[str, float]) -> None:
    assert row == pytest.approx((share, measured["fast"], measured["small"]), rel=TABLE_TOLERANCE)


def test_versions_merge_and_threads_help_as_bench_measured():
    join = MEASURED["joining"]["join"]
    faster = MEASURED["threads"]["times_as_fast_with_two"].values()
    for span, share in join["merged"].items():
        assert cost.MERGED[int(span)] == pytest.approx(share / join["changed"], rel=TABLE_TOLERANCE)
    assert (min(faster), max(faster)) == pytest.approx(cost.TWO_THREADS, rel=0.15)


@contextlib.contextmanager
def clients(bucket: Bucket, folder: Path) -> Iterator[tuple[Any, Any, Watcher]]:
    """A publisher's next version, a reader that takes it over, and its watcher; both hold version 0."""
    run = Drifting(bucket)
    reader = RunReader(bucket, RUN)
    watcher = Watcher(reader)

    def take() -> None:
        newest = watcher.poll()
        for delta in newest.deltas:
            reader.fetch(delta, folder)
        watcher.mark_used()

    take()
    with contextlib.closing(run):
        yield run.step, take, watcher


def test_requests_per_version_are_those_that_the_clients_make(hub, hub_env, tmp_path):
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
    with clients(bucket, tmp_path) as (publish, take, watcher):
        assert counted(hub, publish) == cost.PUBLISHING
        assert counted(hub, take) == {kind: POLL[kind] + cost.TAKING[kind] for kind in POLL}
        assert counted(hub, watcher.poll) == POLL
        safety = partial(watcher.poll, Why.SAFETY)
        assert counted(hub, safety) == {"all": 2, "api": 1, "files": 1}, "a look for safety"


def test_a_long_run_takes_at_most_seven_requests_a_version_log_jumps_and_anchors_included(
    hub, hub_env, tmp_path
):
    """The trainer's ledger counts those to the Hub as the Hub does, and a manifest has the predicted size."""
    versions = 134
    chance = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(60_000, generator=chance)
    (tmp_path / "base").mkdir()
    save_file({"w": weights.bfloat16()}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    with Publisher(f"hf://buckets/team/{uuid4().hex}#run", tmp_path / "base") as publisher:
        publisher.publish({"w": weights})
        publisher.flush()
        ledger = publisher.reader.bucket.ledger
        before = total(ledger.counts()).requests

        def publish() -> None:
            for version in range(1, versions + 1):
                weights.add_(2e-6 * torch.randn(60_000, generator=chance))
                metrics = {f"metric/{name}": version / (name + 1) for name in range(25)}
                publisher.log.append(StepEvent(t=version, step=version, reward=0.5, metrics=metrics))
                publisher.publish({"w": weights})
                newest = publisher.flush()
                assert publisher._outbox.shortcuts.idle(PATIENCE_S)
            assert len(newest.to_bytes()) == pytest.approx(cost.manifest_bytes(1), rel=0.15)

        made = counted(hub, publish)
        asked = total(ledger.counts()).requests - before
    assert made["all"] <= 7 * versions
    plan = Plan(Question(params=10**8, share=0.01, replicas=1, link=1e8))
    assert made["all"] == pytest.approx(versions * plan.publishing("all"), rel=0.05)
    assert asked == pytest.approx(made["api"] + made["files"], abs=2)


def test_requests_per_version_of_several_ranks(hub, hub_env, tmp_path):
    """Of a version after one with parts, whose keys a reader predicts."""
    url = f"hf://buckets/team/{uuid4().hex}"
    ranks = 3
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    main = RunWriter(open_bucket(url, create=True), RUN, model="m", assets=None)
    anchor = AnchorRef(version=0, files=tuple(main.put_weights(0, [tmp_path / "model.safetensors"])))
    facts = {"digest": "0" * 16, "total": 10, "full_bytes": 20, "created_at": time.time()}
    main.commit([], anchor, sync=0, **facts)
    main.part = ".r0"
    reader = RunReader(open_bucket(url), RUN)
    watcher = Watcher(reader)
    watcher.poll()
    watcher.mark_used()
    for version in (1, 2):
        parts = list[DeltaRef]()
        receipts = dict[str, str]()
        others = [PartWriter(main.reader, main.writer, None, f".r{rank}") for rank in range(1, ranks)]
        for each in (main, *others):
            data = os.urandom(100)
            put = partial(each.put_delta, version, data, 1)
            made = counted(hub, lambda put=put, parts=parts: parts.append(put()))
            assert made == cost.PUBLISHING_PART
            receipts |= each.receipts
        main.receipts = receipts
        published = counted(hub, lambda p=tuple(parts), v=version: main.commit(p, None, sync=v, **facts))
        assert published == cost.PUBLISHING
        taken = counted(hub, lambda v=version: reader.fetch_all(watcher.poll().delta, tmp_path / f"{v}"))
        watcher.mark_used()
    further = {kind: (ranks - 1) * count for kind, count in cost.TAKING_PART.items()}
    assert taken == {kind: POLL[kind] + cost.TAKING[kind] + further[kind] for kind in POLL}


def test_large_parts_of_a_version_are_fetched_together(hub, hub_env, tmp_path, monkeypatch):
    """A damaged or a missing one is named as if it had been fetched alone."""
    monkeypatch.setattr(store, "DIRECT", 1000)
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
    contents = {f"runs/r/deltas/1.r{rank}.safetensors": os.urandom(2000 + rank) for rank in range(5)}
    bucket.put_all([*contents.items()])
    sha256 = {key: hashlib.sha256(data).hexdigest() for key, data in contents.items()}
    refs = [FileRef(key=key, size=len(data), sha256=sha256[key]) for key, data in contents.items()]
    reader = RunReader(bucket, "r")
    fetched: list[Path] = []
    taken = counted(hub, lambda: fetched.extend(reader.fetch_all(refs, tmp_path / "all")))
    assert [path.read_bytes() for path in fetched] == [*contents.values()]
    assert (taken["files"], taken["api"]) == (1, 2), "as many as for one part"
    assert counted(hub, lambda: reader.fetch_all(refs, tmp_path / "all"))["all"] == 0
    bucket.put(refs[1].key, b"other")
    with pytest.raises(ProtocolError, match=refs[1].key):
        reader.fetch_all(refs, tmp_path / "damaged")
    bucket.delete([refs[1].key])
    with pytest.raises(ObjectMissingError, match=refs[1].key):
        reader.fetch_all(refs, tmp_path / "missing")


def test_requests_per_version_on_s3(s3_env, caplog, tmp_path):
    """Delta and manifest are put side by side, then HEAD; a look at HEAD, then three objects at once."""
    bucket = open_bucket(f"s3://{uuid4().hex}", create=True)
    with clients(bucket, tmp_path) as (publish, take, _), caplog.at_level("INFO", "werkzeug"):
        for work, said in ((publish, ["GET", "PUT", "PUT", "PUT"]), (take, ["GET", "GET", "GET", "HEAD"])):
            caplog.clear()
            work()
            assert sorted(re.findall(r"(GET|PUT|HEAD|POST) /", caplog.text)) == said


def test_the_parts_of_a_version_are_read_together_with_its_manifest(s3_env, caplog, tmp_path):
    """Their keys are predicted from those of the version before: no key is asked for in vain."""
    run = Drifting(tmp_path / "bucket")
    run.step()
    first = parted(run.reader)
    run.step()
    run.close()
    bucket = open_bucket(f"s3://{uuid4().hex}", create=True)
    bucket.put_all([*first.items()])
    watcher = Watcher(reader := RunReader(bucket, RUN))
    watcher.poll()
    watcher.mark_used()
    bucket.put_all([*parted(run.reader).items()])
    with caplog.at_level("INFO", "werkzeug"):
        caplog.clear()
        reader.fetch_all(watcher.poll().delta, tmp_path)
        said = re.findall(r"(GET|HEAD) /\S+ HTTP/1.1\S* (\d+)", caplog.text)
    assert sorted(said) == [("GET", "200")] * 4 + [("HEAD", "200")], "HEAD, the manifest and two parts"


@pytest.mark.parametrize("latency", MEASURED["hub"]["latencies"])
def test_seconds_over_the_hub_are_those_that_bench_measured(latency):
    measured = MEASURED["hub"]["latencies"][latency]
    published = measured["hand-over to HEAD"]
    polled = measured["HEAD to staged, 1 follower, polling"]
    notified = measured["HEAD to staged, 1 follower, events"]
    plan = Plan(Question(MEASURED["hub"]["weights"], 0.01, replicas=1, link=1e9, latency=float(latency)))
    assert published["in_turn"] == published["requests"] == cost.PUBLISHING["all"]
    assert polled["in_turn"] == plan.fetches == notified["in_turn"] + 1
    assert plan.diff_s + plan.encode_s + plan.upload_s == pytest.approx(published["seconds"], rel=0.2)
    taken = plan.notification_s + plan.fetch_s + plan.stage_s
    assert taken == pytest.approx(polled["seconds"], rel=0.2)


def counted(hub: HubSim, work: Callable[[], object]) -> dict[str, int]:
    before = len(hub.requests())
    work()
    paths = [line.split()[1] for line in hub.requests()[before:]]
    api, files = (sum(part in path for path in paths) for part in ("/api/", "/resolve/"))
    return {"all": len(paths), "api": api, "files": files}


@pytest.mark.parametrize("share", [0.001, 0.01, 0.07, 0.25])
def test_the_formula_of_distances_is_that_of_the_coder(share):
    rng = np.random.default_rng(0)
    size = round(20_000 / share)
    index = np.flatnonzero(rng.random(size) < share)
    patch = codec.Patch("w", (size,), index, rng.choice(np.array([1, 65535], np.uint16), index.size))
    data = codec.encode([patch], lambda name: np.zeros(size, np.uint16), base=0, version=1)
    streams = len(data) - 8 - int.from_bytes(data[:8], "little")
    bits = cost.distance_bits(index.size / size) + 1  # and a sign
    assert 8 * streams / index.size == pytest.approx(bits, rel=0.01)


def test_a_sync_is_the_sum_of_its_parts_and_the_slower_side_sets_the_pace():
    plan = Plan(Question(params=10**9, share=0.01, replicas=4, link=1e8))
    assert plan.upload_s == pytest.approx(plan.delta / 1e8 + 6 * 0.1), "six requests in turn"
    assert plan.fetch_s == pytest.approx(plan.delta / 1e8 + 5 * 0.1), "of more than 8 MB"
    assert plan.hand_over_to_serving_s > plan.diff_s + plan.encode_s + plan.upload_s + plan.fetch_s
    assert plan.published_hour == min(plan.publisher_versions_hour, plan.replica_versions_hour)
    assert plan.egress_hour == pytest.approx(4 * plan.published_hour * (plan.delta + plan.manifest))
    assert plan.sync_bytes > plan.delta + plan.manifest + plan.log + plan.full / plan.anchor_every
    assert plan.full_s > plan.hand_over_to_serving_s
    eight = Plan(Question(params=10**9, share=0.01, replicas=4, link=1e8, cores=8))
    assert eight.encode_s == pytest.approx(plan.encode_s / 4)
    assert eight.stage_s < plan.stage_s
    assert eight.commit_s == pytest.approx(plan.commit_s / 4)


def test_ranks_share_the_work_and_the_links_of_their_machines():
    def planned(ranks: int, **more: Any) -> Plan:
        return Plan(Question(10**12, 0.01, replicas=32, link=1e9, ranks=ranks, workers=16, cores=32, **more))

    one, eight, many = map(planned, (1, 8, 64))
    assert (one.trainer_machines, eight.trainer_machines, many.trainer_machines) == (1, 1, 8)
    assert many.replica_machines == 2
    for part in ("encode_s", "copy_state_s"):
        assert getattr(one, part) == pytest.approx(64 * getattr(many, part))
    exchanged_s = 5e-9 * 10**10 / 64 + 7 / 8 * 6 * 10**10 / 8e9
    assert many.diff_s == pytest.approx(one.diff_s / 64 + exchanged_s)
    assert eight.upload_s == pytest.approx(one.upload_s + 4 * 0.1), "one link; parts before the manifest"
    assert many.upload_s == pytest.approx(8 / 64 * many.delta / 1e9 + 10 * 0.1), "eight parts for each link"
    assert many.anchor_s == pytest.approx(one.anchor_s / 8)
    assert many.link_versions_hour == pytest.approx(8 * one.link_versions_hour, rel=1e-4), "but manifests"
    for plan in (one, many):
        assert plan.fetch_s == pytest.approx(plan.delta / 1e9 + 8 * 0.1), "over one link"
    assert (one.join_anchor_s, one.stage_s, one.commit_s) == (many.join_anchor_s, many.stage_s, many.commit_s)
    small = planned(64, encoding="small")
    assert small.stage_s > 5 * many.stage_s, "the workers of a machine divide the decoding of `fast` only"
    assert (one.mirror, many.mirror) == (one.full, pytest.approx(one.full * 127 / 64**2))
    # All large parts are fetched together.
    slow = planned(64, latency=10.0)
    assert slow.fetch_s == pytest.approx(3 * 10 + 5 * 10 + slow.delta / 1e9)
    assert many.join_deltas_s == pytest.approx(one.join_deltas_s)
    hour = planned(64, steps_per_hour=12)
    # Besides: each rank's jumps, the log's segments, and the look for damage.
    beside = 64 * (1 / 8 + 1 / 64) + 2 / 128 + 1 / 16
    assert hour.api_requests == pytest.approx(32 * (2 + 5) + 2 + beside)
    default = Plan(Question(10**12, 0.01, replicas=32, link=1e9))
    assert (default.trainer_ranks, default.replica_workers) == (200, 30), "by memory"


def test_a_large_delta_takes_further_requests_to_the_api():
    def in_one_version(weights: int) -> tuple[float, ...]:
        asked = Question(weights, 0.01, replicas=1, link=1e9, steps_per_hour=12)  # one in five minutes
        plan = Plan(asked)
        return plan.file_requests, plan.api_requests

    small, larger, largest = map(in_one_version, (6 * 10**8, 10**9, 2 * 10**9))  # 7, 12 and 25 MB
    assert larger == pytest.approx(small)
    assert largest == pytest.approx((small[0], small[1] + 2))


def test_a_trainer_that_is_faster_than_the_publisher_merges_steps():
    asked = Question(params=10**12, share=0.01, replicas=1, link=1e9, ranks=8)
    slow = Plan(replace(asked, steps_per_hour=180))
    assert slow.published_hour == slow.publisher_versions_hour
    assert slow.steps_per_version == pytest.approx(180 / slow.publisher_versions_hour)
    quick = Plan(Question(params=10**8, share=0.01, replicas=1, link=1e9, steps_per_hour=120))
    assert (quick.published_hour, quick.steps_per_version) == (120, 1)


def test_anchors_come_when_half_a_model_is_behind_the_last_or_so_many_files():
    sparse, dense = (RunFiles(10**9, share, "fast", "fp32") for share in (0.001, 0.3))
    for recipe in (sparse, dense):
        due = recipe.anchor_every()
        (before, _, files), (then, _, then_files) = (recipe.after_anchor(v) for v in (due - 1, due))
        assert before <= ANCHOR_PAYS * 2e9
        assert files < MAX_FILES
        assert then > ANCHOR_PAYS * 2e9 or then_files == MAX_FILES
    assert sparse.anchor_every() > dense.anchor_every()


def test_spaces_have_room_for_the_model_or_there_are_none():
    small = Plan(Question(params=6 * 10**8, share=0.01, replicas=3, link=1e8))
    assert (small.space, small.replicas_usd_hour) == ("l4x1", pytest.approx(3 * 0.80))
    assert Plan(Question(params=10**12, share=0.01, replicas=3, link=1e8)).space is None


WORDS = ["plan", "--params", "1T", "--changed", "1%", "--replicas", "32", "--link", "1GB/s"]


@pytest.mark.parametrize(
    ("option", "texts", "values"),
    [
        ("params", "1T 0.6B 135M 1000", [10**12, 6 * 10**8, 135 * 10**6, 1000]),
        ("changed", "1% 0.05%", [0.01, 0.0005]),
        ("link", "100MB/s 10Gb/s", [1e8, 1.25e9]),
        ("replicas", "32", [32]),
        ("ranks", "64", [64]),
        ("latency", "100ms 0.3s 0s", [0.1, 0.3, 0.0]),
    ],
)
def test_quantities_are_parsed(option, texts, values):
    for text, value in zip(texts.split(), values, strict=True):
        question = json.loads(command(*WORDS, "--json", f"--{option}", text).output)["question"]
        assert question["share" if option == "changed" else option] == pytest.approx(value)


@pytest.mark.parametrize(
    ("option", "texts", "fix"),
    [
        ("params", ["1t", "0B", "-1B", "1 T", "1e9", "1GB", ""], "write 1T, 0.6B, 135M or 240K"),
        ("changed", ["0.01", "1", "40%", "0.001%", "-1%", "1 %"], "from 0.01% to 30%"),
        ("link", ["1gb/s", "1GB", "1 GB/s", "0MB/s", "1Gbps", "fast"], "write bytes as 100MB/s or 1GB/s"),
        ("replicas", ["0", "-1", "1.5", "1T", ""], "write digits only"),
    ],
)
def test_a_malformed_quantity_is_refused_with_the_fix(option, texts, fix):
    for text in texts:
        result = command(*WORDS, f"--{option}={text}")
        assert result.code == 2
        assert f"{text!r} is not a" in result.complaint
        assert fix in result.complaint


def test_the_table_states_its_assumptions():
    printed = command(*WORDS, "--trainer", "bf16").output
    assert "one sync of 1 T weights, 1 % changed, encoding fast, trainer bf16" in printed
    assumed = ("no GPU was measured", "200 ranks", "25 for the trainer, 4 for a replica", "over 25 links")
    for stated in assumed:
        assert stated in printed
    smaller = command(*WORDS, "--ranks", "64", "--workers", "16").output
    for stated in ("its ranks: 64", "its workers: 16", "8 for the trainer, 2 for a replica", "64 ranks"):
        assert stated in smaller


def test_json_holds_every_figure():
    figures = json.loads(command(*WORDS, "--json", "--encoding", "small").output)
    plan = Plan(Question(params=10**12, share=0.01, replicas=32, link=1e9, encoding="small"))
    assert figures.items() >= {**vars(plan), "question": vars(plan.question)}.items()
    assert figures["assumptions"]
