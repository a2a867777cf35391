"""A trainer that stops anywhere resumes and publishes the same versions, bit for bit."""

import contextlib
import hashlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.optim import lr_scheduler

from delta_weight_sync import Publisher
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish import states as saving
from delta_weight_sync.publish.outbox import RepeatedSyncs
from delta_weight_sync.publish.state_contents import load_random_state, snapshot_random_state
from delta_weight_sync.publish.states import StateRecord
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import FileRef, Writer
from delta_weight_sync.runlog import RunLogReader, TrafficEvent
from delta_weight_sync.signing import new_pair
from delta_weight_sync.store import open_bucket
from tests.support.alive import Alive
from tests.support.real_run import Drifting

STEPS = 6


class Loop:
    """Random gradients: of torch, numpy and python, so that each of their states counts."""

    def __init__(self, url: str, base: Path, lr: float = 1e-2, wide: int = 40, minutes: float = 0) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, wide))
        self.model[1].bias.data = self.model[1].bias.data.bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.publisher = Publisher(url, base, state_minutes=minutes)
        self.step = 0

    def restore(self) -> bool:
        extra = self.publisher.restore(self.weights(), self.optimizer, schedule=self.schedule)
        self.step = extra["step"] if extra else 0
        return extra is not None

    def weights(self) -> Any:
        return self.model.named_parameters()

    def publish(self) -> None:
        self.publisher.publish(self.weights(), self.step)
        self.publisher.flush()

    def save(self) -> bool:
        extra = {"step": self.step}
        saved = self.publisher.save_state(self.weights(), self.optimizer, extra=extra, schedule=self.schedule)
        extra["step"] = -1  # while the state is being uploaded
        return saved

    def train(self) -> None:
        self.step += 1
        scale = random.gauss() * np.random.standard_normal()
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter) * scale
        self.optimizer.step()
        self.schedule.step()

    def run(self, last: int, every: int = 1) -> None:
        """To step `last`, with a state at the start and every so many steps."""
        if not self.restore():
            self.publish()
            assert self.save()
        while self.step < last:
            self.train()
            self.publish()
            if self.step % every == 0:
                self.save()
                self.publisher.flush()

    def close(self) -> None:
        self.publisher.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#run"


def life(url: str, base: Path, last: int, every: int = 1, **options: Any) -> None:
    """A trainer that stops after step `last`; the next one would draw other random numbers."""
    with contextlib.closing(Loop(url, base, **options)) as loop:
        loop.run(last, every)
    seed(last)


def versions(url: str) -> list[tuple[int, int, str]]:
    return [(m.version, m.sync, m.digest) for m in open_run(url).versions()][::-1]


@pytest.fixture
def undisturbed(base: Path, tmp_path: Path) -> list[tuple[int, int, str]]:
    url = f"{(tmp_path / 'other').as_uri()}#run"
    seed()
    life(url, base, STEPS)
    seed()
    return versions(url)


def seed(number: int = 1) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.mark.parametrize(
    ("lasts", "every"), [((1, 2, 4, STEPS), 1), ((3, 5, 5, STEPS), 4)], ids=["all states", "repeating steps"]
)
def test_lives_one_after_the_other_publish_what_one_publishes(url, base, undisturbed, lasts, every):
    """With a state every fourth step, each life repeats up to three that are not published twice."""
    for last in lasts:
        life(url, base, last, every)
    assert versions(url) == undisturbed
    assert len(undisturbed) == STEPS + 1


def test_from_the_first_deviation_on_it_is_published(url, base, undisturbed):
    life(url, base, 5, every=4)
    loop = Loop(url, base)
    loop.restore()
    assert (loop.step, loop.publisher.repeated_sync) == (4, 4)
    torch.manual_seed(77)  # other rollouts
    loop.train()
    loop.publish()
    loop.train()
    loop.publish()
    loop.close()
    assert versions(url)[:6] == undisturbed[:6]
    assert [(version, sync) for version, sync, _ in versions(url)[6:]] == [(6, 5), (7, 6)]
    assert versions(url)[6][2] != undisturbed[5][2]
    resumed = Loop(url, base)
    resumed.restore()
    torch.manual_seed(77)
    resumed.train()
    resumed.publish()
    assert resumed.publisher.repeated_sync == 5, (
        "of two that were published as sync 5, it repeats the later one"
    )
    resumed.close()
    assert len(versions(url)) == 8


def test_a_state_is_the_newest_that_is_whole(url, base, undisturbed, caplog):
    life(url, base, 3)
    bucket = open_bucket(url.partition("#")[0])
    states = [info.key for info in bucket.list("runs/run/state/")]
    assert len(states) == 4, "two are kept, each a record and an object"
    newest = max(key for key in states if key.endswith(".safetensors"))
    bucket.put(newest, bucket.get(newest)[:-1] + b"?")
    life(url, base, 4)
    assert f"{newest} is not the published object" in caplog.text
    bucket.put(max(key for key in states if key.endswith(".json")), b"{")
    life(url, base, STEPS)
    assert versions(url) == undisturbed


def test_a_damaged_newest_version_is_followed_by_the_restored_weights(url, base, undisturbed, tmp_path):
    """As `trainer/train.py` resumes: find the state, publish the base, restore, publish the first sync."""
    life(url, base, 5, every=4)
    (newest,) = tmp_path.glob("bucket/runs/run/deltas/00000005*")
    newest.write_bytes(b"torn")
    with contextlib.closing(Loop(url, base)) as loop:
        assert loop.publisher.find_state()
        loop.publisher.publish_base(loop.weights(), 1)
        loop.restore()
        loop.publish()
        assert loop.publisher.repeated_sync == 4, "replicas may still serve it from the earlier trainer"
        loop.train()
        loop.publish()
    assert [(6, *undisturbed[4][1:]), (7, *undisturbed[5][1:])] == versions(url)[6:]


def test_a_damaged_manifest_before_the_newest_state_is_not_read(url, base, tmp_path, monkeypatch):
    life(url, base, 5, every=4)  # the states of versions 0 and 4
    next(tmp_path.glob("bucket/runs/run/manifests/00000002*")).write_bytes(b"torn")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.closing(Loop(url, base)) as loop:
        assert (loop.restore(), loop.step) == (True, 4)
        assert [*tmp_path.glob("*/rank-0.safetensors")] == [], "what was restored does not stay on the disk"


@pytest.mark.finding("M9")
def test_the_manifests_behind_an_old_state_are_not_kept(tmp_path, monkeypatch):
    run = Drifting(tmp_path / "bucket")
    first = run.newest
    run.steps(20)
    run.close()
    name = run.reader.keys.state(first.version, first.sync, Writer(first.writer_term, first.writer))
    run.reader.bucket.put(f"{name}/rank-0.safetensors", b"state")
    of = first.model_dump(include={"run", "born", "version", "digest", "sync", "created_at"})
    rank = run.reader.bucket.stat(f"{name}/rank-0.safetensors")
    ranks = (FileRef(key=rank.key, size=rank.size, sha256="0" * 64),)
    run.reader.bucket.put(f"{name}.json", StateRecord(**of, ranks=ranks, extra={}).to_bytes())
    alive = Alive(monkeypatch)
    ((record, later),) = saving.usable_states(run.reader)
    assert record.version == 0
    assert [sync for sync, _ in later] == list(range(20, 0, -1))
    assert alive.read > 20
    assert alive.most < 5


def test_states_of_a_signed_run_are_signed(url, base, monkeypatch, caplog):
    """Without the key, write access to the bucket does not change the state that a trainer resumes from."""
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    life(url, base, 2)
    bucket = open_bucket(url.partition("#")[0])
    newest = max(info.key for info in bucket.list("runs/run/state/") if info.key.endswith(".json"))
    record = StateRecord.model_validate_json(bucket.get(newest))
    assert len(bucket.get(newest)) < 2000, "what grows with the model is in the objects"
    bucket.put(newest, StateRecord(**record.model_dump(exclude={"seal", "signature"})).to_bytes())
    with contextlib.closing(Loop(url, base)) as loop:
        loop.restore()
        assert loop.step == 1, "the one before it"
    assert f"{newest} has no signature" in caplog.text


def test_an_object_that_is_not_a_states_is_skipped(url, base, caplog):
    """For example that of an earlier release; its record is intact, and names its sha256."""
    life(url, base, 2)
    bucket = open_bucket(url.partition("#")[0])
    newest = max(info.key for info in bucket.list("runs/run/state/") if info.key.endswith(".json"))
    record = StateRecord.model_validate_json(bucket.get(newest))
    key = record.ranks[0].key
    data = safetensors.torch.save({"weight/0.weight": torch.ones(30, 8)})
    bucket.put(key, data)
    ranks = (FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest()),)
    kept = record.model_dump(exclude={"seal", "signature", "ranks"})
    bucket.put(newest, StateRecord(**kept, ranks=ranks).to_bytes())
    with contextlib.closing(Loop(url, base)) as loop:
        loop.restore()
        assert loop.step == 1, "the one before it"
    assert f"{key} is not a trainer's state" in caplog.text


def test_a_run_with_a_first_version_and_no_state_begins_again(url, base, undisturbed):
    """The trainer died between the two."""
    loop = Loop(url, base)
    loop.publish()
    loop.close()
    seed()
    life(url, base, STEPS)
    assert versions(url) == undisturbed


def test_another_trainer_is_refused_with_what_differs(url, base):
    life(url, base, 2)
    with pytest.raises(
        StateError, match=r"initial_lr was \[0\.01\] when the state was saved and is \[0\.1\]"
    ):
        life(url, base, 3, lr=0.1)
    with contextlib.closing(Loop(url, base)) as loop:
        loop.optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(StateError, match=r"optimizer groups' weight_decay was \[0\.01\] .* is \[0\.5\]"):
            loop.restore()
    with contextlib.closing(Loop(url, base)) as loop:
        loop.schedule = lr_scheduler.ConstantLR(loop.optimizer, 1.0)
        with pytest.raises(StateError, match=r"trainer's schedule was LambdaLR .* is ConstantLR"):
            loop.restore()
    with pytest.raises(
        StateError, match=r"1\.bias was torch.bfloat16 \[40\] when .* is torch.bfloat16 \[41\]"
    ):
        life(url, base, 3, wide=41)
    with contextlib.closing(Loop(url, base)) as loop:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-2)
        with pytest.raises(
            StateError, match="the trainer's optimizer was AdamW when the state was saved and is SGD"
        ):
            loop.restore()
        loop.model.double()
        with pytest.raises(StateError, match=r"0\.weight was torch.float32 .* and is torch.float64"):
            loop.restore()


def test_groups_are_compared_though_the_first_trainer_called_no_restore(url, base):
    """As `trainer.train`, which saves its first state before the first step."""

    def begin(decay: float) -> Any:
        weights = {"w": torch.ones(4, requires_grad=True)}
        return weights, torch.optim.AdamW([{"params": weights.values(), "weight_decay": decay}])

    weights, optimizer = begin(0.1)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        publisher.save_state(weights.items(), optimizer)
    weights, optimizer = begin(0.2)
    with Publisher(url, base) as publisher, pytest.raises(StateError, match=r"weight_decay was \[0\.1\]"):
        publisher.restore(weights.items(), optimizer)


def test_a_run_without_states_is_not_begun_again_by_mistake(url, base):
    with Publisher(url, base) as publisher:
        publisher.publish([("w", torch.zeros(4))])
        publisher.publish([("w", torch.ones(4))])
    with Publisher(url, base) as publisher, pytest.raises(StateError, match="start again from the base"):
        publisher.find_state()


def test_a_state_is_of_a_version_though_a_slow_link_merges(url, base):
    """A sync with a saved state is not merged with later syncs."""
    loop = Loop(url, base)
    loop.publish()
    loop.save()
    outbox = loop.publisher._outbox
    with outbox._changed:  # nothing is taken to the bucket meanwhile
        for _ in range(2):
            loop.train()
            loop.publisher.publish(loop.weights(), loop.step)
        assert loop.save()
        for _ in range(2):
            loop.train()
            loop.publisher.publish(loop.weights(), loop.step)
        assert not loop.save(), "one is on its way"
    loop.publisher.flush()
    loop.close()
    assert [sync for _, sync, _ in versions(url)] == [0, 2, 4]
    again = Loop(url, base)
    assert again.restore()
    assert again.step == 2
    again.close()


@pytest.mark.parametrize("save", [False, True], ids=["flush", "final state"])
def test_the_last_sync_of_another_course_is_published(url, base, save):
    """Though the earlier trainer merged its sync of that number into a later version."""
    weights = {"w": torch.zeros(4)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items(), 0)
        publisher.save_state(weights.items(), optimizer)
        weights["w"] += 1
        publisher.publish(weights.items(), 10)
    with Publisher(url, base) as publisher:
        publisher.restore(weights.items(), optimizer)
        for step in (1, 2, 3):
            weights["w"] -= 1
            publisher.publish(weights.items(), step)
        assert [sync for _, sync, _ in versions(url)] == [0, 10], "it may still repeat the merged ones"
        if save:
            assert publisher.save_state(weights.items(), optimizer, extra={"step": 3}, final=True)
        assert publisher.flush().digest == publisher.digest(weights.items())
    assert [sync for _, sync, _ in versions(url)] == [0, 10, 3]
    with Publisher(url, base) as publisher:
        assert publisher.restore(weights.items(), optimizer) == ({"step": 3} if save else {})


def test_what_holds_back_and_what_does_not():
    replay = RepeatedSyncs({3: "a", 5: "b"})
    assert replay.newest == 3
    assert replay.holds_back(3, "a")
    assert replay.holds_back(4, "?"), "it was merged into 5"
    assert replay.holds_back(5, "b")
    assert replay.newest == 5
    assert not replay.holds_back(6, "c")
    assert not replay.holds_back(3, "a"), "what is past is past"
    assert not RepeatedSyncs({3: "a"}).holds_back(3, "z")


def test_weights_that_no_version_holds_are_restored_in_full(url, base):
    """Float64, and what is trained but not published."""
    weights = {"w": torch.randn(4), "d": torch.randn(4).double()}
    apart = {"own": torch.randn(3), "count": torch.arange(2)}
    optimizer = torch.optim.SGD([weights["w"]], lr=0.1)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        publisher.save_state((weights | apart).items(), optimizer)
    blank = {name: torch.zeros_like(tensor) for name, tensor in (weights | apart).items()}
    optimizer = torch.optim.SGD([blank["w"]], lr=0.1)
    with Publisher(url, base) as publisher:
        assert publisher.restore(blank.items(), optimizer) == {}
    for name, tensor in (weights | apart).items():
        assert torch.equal(blank[name], tensor), name


def test_a_state_of_other_weights_than_its_versions_is_refused(url, base):
    """Whatever else it holds."""
    weights = {"w": torch.ones(4)}
    apart = {"own": torch.ones(3)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        weights["w"] += 1
        publisher.save_state((weights | apart).items(), optimizer)
    with Publisher(url, base) as publisher, pytest.raises(StateError, match="are not those of its version 0"):
        publisher.restore((weights | apart).items(), optimizer)


class WeightDecay:
    """Each step changes a group's value other than `lr`, and adds one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state_dict = dict[str, Any]
        self.load_state_dict = id

    def step(self) -> None:
        group = self.optimizer.param_groups[0]
        group["weight_decay"] += 0.01
        group["steps"] = group.get("steps", 0) + 1


SCHEDULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "weight decay": WeightDecay,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [4, 4, 6], 0.1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.MultiStepLR(o, [3], 0.1)], [2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_restored_schedule_goes_on_as_the_one_that_was_saved(url, base, make):
    def begin() -> Any:
        weights = {"w": torch.ones(4, requires_grad=True)}
        optimizer = torch.optim.AdamW(weights.values(), lr=1.0)
        return weights, optimizer, make(optimizer)

    def rest(optimizer: torch.optim.Optimizer, schedule: Any) -> list[dict[str, Any]]:
        found = []
        for _ in range(5):
            optimizer.step()
            schedule.step()
            found += [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
        return found

    weights, optimizer, schedule = begin()
    with Publisher(url, base) as publisher:
        assert publisher.restore(weights.items(), optimizer, schedule=schedule) is None
        for _ in range(3):
            optimizer.step()
            schedule.step()
        publisher.publish(weights.items())
        assert publisher.save_state(weights.items(), optimizer, schedule=schedule)
    expected = rest(optimizer, schedule)
    weights, optimizer, schedule = begin()
    with Publisher(url, base) as publisher:
        assert publisher.restore(weights.items(), optimizer, schedule=schedule) == {}
    assert rest(optimizer, schedule) == expected


@pytest.mark.parametrize(
    "extra",
    [
        {5: "five", None: 1.5, True: (1, (2,)), (1, "a"): [{-1: {}}]},
        {"__tuple__": [1, 2]},
        {"counts": Counter({3: 2, 1: 1}), "__items__": {"__items__": [[1, 2]]}, "nan": float("inf")},
    ],
)
def test_extra_comes_back_with_its_keys_and_types(url, base, extra):
    weights = {"w": torch.ones(4)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        publisher.save_state(weights.items(), optimizer, extra=extra)
    with Publisher(url, base) as publisher:
        found = publisher.restore(weights.items(), optimizer)
        assert repr(found) == repr(extra), "also its types"
        with pytest.raises(StateError, match=r"`extra` cannot be saved in a state .*object is not JSON"):
            publisher.save_state(weights.items(), optimizer, extra={object(): 1}, final=True)


def test_as_much_extra_is_saved_as_can_be_restored(url, base):
    weights = {"w": torch.ones(4)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    numbers = [1] * 1000
    extra = {"numbers": numbers, "text": "x" * (saving.EXTRA_BYTES - 2 * len(numbers) - 23)}
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        with pytest.raises(
            StateError, match=r"`extra` has 7,340,033 bytes as JSON, and a state may have 7,340,032"
        ):
            publisher.save_state(weights.items(), optimizer, extra={**extra, "text": extra["text"] + "x"})
        assert publisher.save_state(weights.items(), optimizer, extra=extra)
    with Publisher(url, base) as publisher:
        assert publisher.restore(weights.items(), optimizer) == extra


def test_a_state_that_lost_keys_is_refused(url, base, caplog):
    """It is of an earlier release, and its schedule may have been one with milestones."""
    life(url, base, 2)
    forge(url, lambda header: header.pop("format"))
    with contextlib.closing(Loop(url, base)) as loop, pytest.raises(StateError, match="no state to resume"):
        loop.restore()
    assert "of an earlier release" in caplog.text


@pytest.mark.parametrize(
    "value", [{"__items__": [[[], 1]]}, {"__tuple__": 5}, {"__counter__": [[1, "a", 2]]}]
)
def test_a_damaged_value_is_refused(url, base, value):
    life(url, base, 0)
    forge(url, lambda header: header["others"].update(schedule=value))
    with contextlib.closing(Loop(url, base)) as loop:
        assert not loop.restore()


def forge(url: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the headers of all states in the bucket."""
    bucket = open_bucket(url.partition("#")[0])
    for info in [*bucket.list("runs/run/state/")]:
        if info.key.endswith(".json"):
            record = StateRecord.model_validate_json(bucket.get(info.key))
            key = record.ranks[0].key
            with tempfile.NamedTemporaryFile() as file:
                file.write(bucket.get(key))
                file.flush()
                with safetensors.safe_open(file.name, "pt") as opened:
                    header = json.loads(opened.metadata()["header"])
                    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            change(header)
            data = safetensors.torch.save(tensors, {"header": json.dumps(header)})
            bucket.put(key, data)
            ranks = (FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest()),)
            kept = record.model_dump(exclude={"seal", "signature", "ranks"})
            bucket.put(info.key, StateRecord(**kept, ranks=ranks).to_bytes())


def test_a_rank_without_a_predecessor_draws_numbers_of_its_own():
    def draws(branch: int) -> tuple[float, float, float]:
        load_random_state(saved, branch)
        return torch.rand(()).item(), np.random.rand(), random.random()

    saved = snapshot_random_state()
    drawn = [draws(branch) for branch in (0, 1, 2, 0, 1)]
    assert drawn[:2] == drawn[3:], "a repetition draws the same"
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))


def test_a_value_that_cannot_be_saved_is_refused(url, base):
    weights = {"w": torch.randn(4, requires_grad=True)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    optimizer.state[weights["w"]]["x"] = torch.randn(4, dtype=torch.complex64)
    with Publisher(url, base) as publisher:
        publisher.publish(weights.items())
        with pytest.raises(StateError, match=r"optimizer/0\.0/x is a Tensor of torch\.complex64"):
            publisher.save_state(weights.items(), optimizer)
        odd: Any = SimpleNamespace(state_dict=lambda: {"it": json})
        with pytest.raises(StateError, match="the schedule cannot be saved"):
            publisher.save_state(weights.items(), torch.optim.SGD(weights.values()), schedule=odd)
        with pytest.raises(StateError, match="`extra` cannot be saved"):
            publisher.save_state(weights.items(), torch.optim.SGD(weights.values()), extra={"it": json})


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_an_optimizer_that_keeps_its_moments_elsewhere_is_refused(url, base, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, in torch itself

    weights = {"w": torch.randn(4, requires_grad=True)}
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(weights.values(), torch.optim.AdamW)
        with Publisher(url, base) as publisher:
            publisher.publish(weights.items())
            with pytest.raises(StateError, match="a ZeroRedundancyOptimizer divides its moments"):
                publisher.save_state(weights.items(), optimizer)
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_that_could_not_be_uploaded_is_freed(url, base):
    with contextlib.closing(Loop(url, base)) as loop:
        loop.run(0)
        with mock.patch.object(loop.publisher.reader.bucket, "_put", side_effect=OSError("no space left")):
            assert loop.save()
            loop.publisher.flush()
        failure = loop.publisher.state_failure
        assert failure.__traceback__ is failure.__cause__ is failure.__context__ is None


@pytest.mark.parametrize(("upload_s", "saved_at"), [(1, [0, 300, 600, 900]), (60, [0, 600, 1200])])
def test_states_are_minutes_apart_and_take_a_tenth_of_the_time_at_most(
    url, base, monkeypatch, upload_s, saved_at
):
    """Of a step every 100 seconds; all their bytes are in the run's log."""
    clock = [0.0]
    put_file = saving.put_file

    def slow(*arguments: Any) -> Any:
        clock[0] += upload_s
        return put_file(*arguments)

    monkeypatch.setattr(saving, "put_file", slow)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    done = []
    with contextlib.closing(Loop(url, base, minutes=5)) as loop:
        for at in range(0, 1201 if upload_s > 1 else 1000, 100):
            clock[0] = at
            loop.train()
            loop.publish()
            done += [at] * loop.save()
            loop.publisher.flush()
        assert not loop.save()
        loop.train()
        loop.publish()
        assert loop.publisher.save_state(loop.weights(), loop.optimizer, final=True)
        loop.publisher.flush()
        loop.publish()
        states = loop.publisher.reader.bucket.list("runs/run/state/")
        ledger = loop.publisher.reader.bucket.ledger
    assert done == saved_at
    events = RunLogReader(open_bucket(url.partition("#")[0]), "run").poll()
    *_, last = (event for event in events if isinstance(event, TrafficEvent))
    assert sum(info.size for info in states) < last.sent["states"] < sum(last.sent.values()) <= ledger.sent
