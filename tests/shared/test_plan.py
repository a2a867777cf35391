"""The cost model against what was measured here, and against the rules of the program."""

import argparse
import json
from collections.abc import Callable
from uuid import uuid4

import numpy as np
import pytest
import torch

from bench import results
from delta_weight_sync import codec
from delta_weight_sync.cli import main, quantities
from delta_weight_sync.history import RunReader
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.plan import Question, coding, model, predict, rates, text
from delta_weight_sync.plan.shortcuts import Shortcuts
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from delta_weight_sync.ways import ANCHOR_PAYS, MAX_FILES
from tests.hubsim import HubSim

MEASURED = results.read()
TRAINERS = {"fp32 master, late": "fp32", "fp32 master, from bf16": "fp32-start", "bf16 weights": "bf16"}
SETS = [(s["model"], TRAINERS[s["trainer"]], s) for s in MEASURED["size"]["sets"]]
GROWTH = [*MEASURED["growth"]["changes"], *MEASURED["growth"]["size"]]
SIZE_TOLERANCE, TIME_FACTOR, TABLE_TOLERANCE = 0.05, 2.0, 0.01


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize(("name", "trainer", "one"), SETS)
def test_sizes_of_every_measured_set(name, trainer, one, encoding):
    predicted = coding.delta_bytes(one["elements"], one["share"], encoding, trainer)
    assert predicted == pytest.approx(one["bytes"][encoding], rel=SIZE_TOLERANCE)


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("one", GROWTH, ids=lambda o: f"{o['elements'] / 1e6:.0f}M-{o['share']:.2%}")
def test_sizes_and_seconds_as_model_and_changes_grow(one, encoding):
    weights, changes = one["elements"], one["changed"]
    size = coding.delta_bytes(weights, one["share"], encoding, "fp32")
    assert size / changes == pytest.approx(one["per_change"][encoding], rel=SIZE_TOLERANCE)
    encode, decode = (
        model.encode_s(weights, changes, encoding),
        rates.DECODE[encoding].seconds(weights, changes),
    )
    assert_time(encode, one["parts"][f"encode {encoding}"]["median_s"])
    assert_time(decode, one["parts"][f"decode {encoding}"]["median_s"])


def assert_time(predicted: float, measured: float) -> None:
    assert measured / TIME_FACTOR < predicted < measured * TIME_FACTOR


def test_the_other_parts_of_a_sync():
    section = MEASURED["speed"]
    weights, changes = section["elements"], section["changed"]
    costs = {
        "diff fp32": rates.DIFF["fp32"],
        "diff bf16": rates.DIFF["bf16"],
        "digest": rates.DIGEST,
        "stage": rates.PLACE,
        "commit": rates.COMMIT,
        "apply small": rates.APPLY,
        "publish whole": rates.SAVE,
        "receive whole": rates.LOAD,
    }
    for part, cost in costs.items():
        assert_time(cost.seconds(weights, changes), section["parts"][part]["median_s"])


def test_the_parts_of_a_live_replica():
    """vLLM on the CPU with requests in flight: beside generation, and while generation waits."""
    live = MEASURED["live"]
    weights, changes = live["elements"], live["changed"]
    stage = sum(cost.seconds(weights, changes) for cost in (rates.DECODE["fast"], rates.DIGEST, rates.PLACE))
    assert_time(stage, live["commits"]["our stage"]["median_s"])
    assert_time(rates.COMMIT.seconds(weights, changes), live["commits"]["ours"]["median_s"])
    for syncs in live["syncs"].values():
        assert_time(rates.COMMIT.seconds(weights, changes), 1e-3 * syncs["pause_ms"]["p50"])


def test_the_table_of_sizes_is_what_bench_measured():
    """A new measurement that differs belongs into delta_weight_sync/plan/rates.py."""
    rows = {row["share"]: row["per_change"] for row in MEASURED["growth"]["changes"]}
    for (share, measured), size in zip(rows.items(), rates.SIZES["fp32"], strict=True):
        close = pytest.approx((share, measured["fast"], measured["small"]), rel=TABLE_TOLERANCE)
        assert (size.share, size.fast, size.small) == close
    for trainer in ("fp32-start", "bf16"):
        found = [one for _, kind, one in SETS if kind == trainer][-1]
        expected = (found["share"], found["per_change"]["fast"], found["per_change"]["small"])
        size = min(rates.SIZES[trainer], key=lambda size: abs(size.share - found["share"]))
        assert (size.share, size.fast, size.small) == pytest.approx(expected, rel=TABLE_TOLERANCE)


def test_versions_merge_as_bench_measured():
    join = MEASURED["joining"]["join"]
    for span, share in join["merged"].items():
        assert rates.MERGED[int(span)] == pytest.approx(share / join["changed"], rel=TABLE_TOLERANCE)


def test_threads_help_as_much_as_is_said():
    measured = MEASURED["threads"]["times_as_fast_with_two"].values()
    assert (min(measured), max(measured)) == pytest.approx(rates.TWO_THREADS, rel=0.15)


def test_more_cores_encode_and_decode_sooner():
    two, eight = (predict(Question(10**12, 0.01, 1, 1e9, cores=cores)) for cores in (2, 8))
    assert eight.parts.encode == pytest.approx(two.parts.encode / 4)
    assert eight.parts.stage < two.parts.stage
    assert eight.parts.commit == two.parts.commit
    assert eight.join.deltas_s < two.join.deltas_s
    assert "two were measured to be 1.1 to 1.6 times as fast" in text.table(eight)


def test_requests_per_version_are_those_that_the_clients_make(hub, hub_env, tmp_path):
    (tmp_path / "assets").mkdir()
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
    weights = {"w": torch.ones(300, 300)}
    log = RunLogWriter(bucket, "run", every_s=3600)
    publisher = Outbox(RunWriter(bucket, "run", model="m", assets=tmp_path / "assets"), log)
    publisher.publish(weights.items(), 1)
    weights["w"][7] *= 1.5

    reader = RunReader(bucket, "run")
    lookout = Lookout(reader)
    lookout.look()
    lookout.taken()

    def publish() -> None:
        publisher.publish(weights.items(), 2)
        publisher.flush()

    def take() -> None:
        newest = lookout.look()
        reader.fetch(newest.deltas[-1], tmp_path)

    for work, said, looks in ((publish, rates.PUBLISHING, 0), (take, rates.TAKING, 1)):
        made = counted(hub, work)
        assert (made.files - looks, made.api) == (said.files, said.api)
        assert made.all == pytest.approx(said.all, abs=5), "Xet's own depend on what it has in its caches"
    lookout.taken()
    assert counted(hub, lookout.look) == rates.Requests(1, 0, 1)
    lookout._notice.expected = True
    assert counted(hub, lookout.look) == rates.Requests(2, 1, 1), "for safety"
    publisher.close()
    log.close()


def counted(hub: HubSim, work: Callable[[], object]) -> rates.Requests:
    before = len(hub.requests())
    work()
    paths = [line.split()[1] for line in hub.requests()[before:]]
    api, files = (sum(part in path for path in paths) for part in ("/api/", "/resolve/"))
    return rates.Requests(len(paths), api, files)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.07, 0.25])
def test_the_formula_of_distances_is_that_of_the_coder(share):
    rng = np.random.default_rng(0)
    size = round(20_000 / share)
    index = np.flatnonzero(rng.random(size) < share)
    patch = codec.Patch("w", (size,), index, rng.choice(np.array([1, 65535], np.uint16), index.size))
    data = codec.encode([patch], lambda name: np.zeros(size, np.uint16), base=0, version=1)
    streams = len(data) - 8 - int.from_bytes(data[:8], "little")
    bits = coding.distance_bits(index.size / size) + 1  # and a sign
    assert 8 * streams / index.size == pytest.approx(bits, rel=0.01)


def test_a_sync_is_the_sum_of_its_parts_and_the_slower_side_sets_the_pace():
    plan = predict(Question(params=10**9, share=0.01, replicas=4, link=1e8))
    assert plan.parts.upload == plan.parts.fetch == plan.delta / 1e8
    assert plan.parts.total > plan.parts.diff + plan.parts.encode + plan.parts.upload + plan.parts.fetch
    assert plan.published_hour == min(plan.publisher_versions_hour, plan.replica_versions_hour)
    assert plan.egress_hour == pytest.approx(4 * plan.published_hour * plan.delta)
    assert plan.whole.seconds > plan.parts.total


def test_a_trainer_that_is_faster_than_the_publisher_merges_steps():
    slow = predict(Question(params=10**12, share=0.01, replicas=1, link=1e9, steps_per_hour=120))
    assert slow.published_hour == slow.publisher_versions_hour
    assert slow.steps_per_version == pytest.approx(120 / slow.publisher_versions_hour)
    quick = predict(Question(params=10**8, share=0.01, replicas=1, link=1e9, steps_per_hour=120))
    assert (quick.published_hour, quick.steps_per_version) == (120, 1)


def test_anchors_come_when_half_a_model_is_behind_the_last_or_so_many_files():
    sparse, dense = (
        predict(Question(params=10**9, share=share, replicas=1, link=1e8)) for share in (0.001, 0.3)
    )
    for plan in (sparse, dense):
        shortcuts = Shortcuts(10**9, plan.question.share, "fast", "fp32")
        before, now = (shortcuts.behind(plan.anchor_every - back) for back in (1, 0))
        assert before.size <= ANCHOR_PAYS * plan.full
        assert before.files < MAX_FILES
        assert now.size > ANCHOR_PAYS * plan.full or now.files == MAX_FILES
    assert sparse.anchor_every > dense.anchor_every
    often = predict(Question(params=10**9, share=0.001, replicas=1, link=1e8, anchor_every=20))
    assert often.stored_hour / often.published_hour > sparse.stored_hour / sparse.published_hour


def test_who_joins_fetches_few_files_and_fewer_bytes_than_all_deltas():
    shortcuts = Shortcuts(6 * 10**8, 0.01, "fast", "fp32")
    way = shortcuts.behind(64 + 3 * 8 + 5)
    assert way.files == 1 + 3 + 5
    assert way.size < 0.7 * 93 * shortcuts.delta


def test_spaces_have_room_for_the_model_or_there_are_none():
    small = predict(Question(params=6 * 10**8, share=0.01, replicas=3, link=1e8))
    assert (small.money.space, small.money.replicas_hour) == ("l4x1", pytest.approx(3 * 0.80))
    assert predict(Question(params=10**12, share=0.01, replicas=3, link=1e8)).money.space is None


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (quantities.weights, "1T", 10**12),
        (quantities.weights, "0.6B", 6 * 10**8),
        (quantities.weights, "135M", 135 * 10**6),
        (quantities.weights, "1000", 1000),
        (quantities.share, "1%", 0.01),
        (quantities.share, "0.05%", 0.0005),
        (quantities.speed, "100MB/s", 1e8),
        (quantities.speed, "10Gb/s", 1.25e9),
        (quantities.positive, "32", 32),
        (quantities.dollars, "0.09", 0.09),
    ],
)
def test_quantities(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "texts", "fix"),
    [
        (quantities.weights, ["1t", "0B", "-1B", "1 T", "1e9", "1GB", ""], "write 1T, 0.6B, 135M or 240K"),
        (quantities.share, ["0.01", "1", "40%", "0.001%", "-1%", "1 %"], "from 0.01% to 30%"),
        (quantities.speed, ["1gb/s", "1GB", "1 GB/s", "0MB/s", "1Gbps", "fast"], "write bytes as 100MB/s"),
        (quantities.positive, ["0", "-1", "1.5", "1T", ""], "write digits only"),
        (quantities.dollars, ["$0.09", "-1", "free"], "dollars per gigabyte"),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_fix(parse, texts, fix):
    for written in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=fix):
            parse(written)


WORDS = ["plan", "--params", "1T", "--changed", "1%", "--replicas", "32", "--link", "1GB/s"]


def test_the_table_states_its_assumptions(capsys):
    main([*WORDS, "--anchor-every", "64", "--price-egress", "0.05", "--trainer", "bf16"])
    printed = capsys.readouterr().out
    assert "one sync of 1 T weights, 1 % changed, encoding fast, trainer bf16" in printed
    for stated in (
        "no GPU was measured",
        "200 ranks",
        "what-if",
        "the Hub includes 8",
        "egress at your price",
    ):
        assert stated in printed


def test_json_holds_every_figure(capsys):
    main([*WORDS, "--json", "--encoding", "small"])
    figures = json.loads(capsys.readouterr().out)
    plan = predict(Question(params=10**12, share=0.01, replicas=32, link=1e9, encoding="small"))
    assert (figures["delta"], figures["parts"]["commit"]) == (plan.delta, plan.parts.commit)
    assert figures["hand_over_to_serving_s"] == plan.parts.total
    assert figures["assumptions"]


def test_a_wrong_unit_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*WORDS[:-1], "1gb/s"])
    assert "'1gb/s' is no speed of a link: write bytes as 100MB/s or 1GB/s" in capsys.readouterr().err
