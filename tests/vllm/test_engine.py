"""A vLLM of several engines answers as one: none may be left behind unseen.

Its client is stood in for, as an engine has to fail; tests/live/test_parallel.py has real ones.
"""

import asyncio
import hashlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from delta_weight_sync import compat
from delta_weight_sync.errors import CompatibilityError, EngineError, SettingsError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.store import Bucket, open_bucket, replacing
from delta_weight_sync.store._files import FileBucket
from delta_weight_sync.vllm import plugin
from delta_weight_sync.vllm.engine import Engine
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.server import PREFIX, settings_from
from delta_weight_sync.vllm.worker import call
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from tests.support.fake_vllm import InMemoryVllm, wait_until_serving
from tests.support.real_run import RealRun
from tests.support.waiting import PATIENCE_S, soon

Answer = dict[str, Any]


def engine(loop: asyncio.AbstractEventLoop, answers: dict[str, list[list[list[Answer]]]]) -> Engine:
    """`answers`: of each operation, one after the other: engines, and their workers."""

    async def call_all(utility: str, method: str, timeout: None, args: tuple[()], kwargs: Any) -> Any:
        given = answers[kwargs["op"]]
        return given.pop(0) if len(given) > 1 else given[0]

    return Engine(SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_all)), loop)


STAGED = {"done": True, "stage_s": 1.0}
VERSION = [], "0" * 16, "1.1.1"


def test_what_one_of_them_refuses_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    refusal = {"error": "another digest", "kind": "codec"}
    fine = {"commit_s": 0.1, "pause_s": 0.2}
    for answers in (
        {"stage": [[[STAGED | fine], [refusal]]]},
        {"stage": [[[STAGED]]], "commit": [[[refusal]]]},
        {"stage": [[[{"error": "see the other worker", "kind": "worker"}, refusal]]]},
    ):
        with pytest.raises(EngineError, match="another digest") as caught:
            engine(loop, answers).take(*VERSION)
        assert caught.value.kind == "codec"


def test_a_version_is_committed_when_all_have_staged_it(loop: asyncio.AbstractEventLoop) -> None:
    busy = {"done": False}
    later = {"done": True, "stage_s": 2.0}
    staged = [[[STAGED], [busy]], [[STAGED], [busy]], [[STAGED], [later]]]
    first = {"commit_s": 0.1, "pause_s": 0.2, "live_at": 7.0}
    second = [{"commit_s": 0.3, "pause_s": 0.4, "live_at": 9.0}, {"commit_s": 0.2, "live_at": 8.0}]
    answers = {"stage": [[[busy], [busy]]], "staged": staged, "commit": [[[first], second]]}
    assert engine(loop, answers).take(*VERSION) == (2.0, 0.4, 0.3, 9.0), "the longest and last of each"
    assert len(staged) == 1, "it asked until the last one was done"


def test_a_stage_of_a_second_is_asked_for_a_few_times(loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several workers each question waits for the steps under way."""
    slept: list[float] = []
    monkeypatch.setattr("delta_weight_sync.vllm.engine.time.sleep", slept.append)
    busy = [[{"done": False}]]
    answers = {"stage": [busy], "staged": [busy] * 10 + [[[STAGED]]], "commit": [[[{}]]]}
    engine(loop, answers).take(*VERSION)
    assert len(slept) == 11
    assert sum(slept) > 1


def test_a_vllm_that_dies_over_a_call_is_an_error(loop, monkeypatch) -> None:
    """vLLM's client never answers a call that was under way when its engine died."""
    monkeypatch.setattr("delta_weight_sync.vllm.engine._CHECK_S", 0.01)
    client = SimpleNamespace(errored=True, update_weight_version=lambda label: asyncio.sleep(3600))
    with pytest.raises(EngineError, match="vLLM died"):
        Engine(client, loop).relabel("new")


HOUR = 3600.0


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealRun]:
    on_hub = "hub_env" in request.fixturenames
    url = f"hf://buckets/team/{uuid4().hex}" if on_hub else f"file://{tmp_path}/bucket"
    run = RealRun(open_bucket(url, create=True), run="told", layers=1)
    yield run
    run.close()


@pytest.fixture
def follower(run: RealRun, vllm: InMemoryVllm, tmp_path: Path) -> Iterator[Follower]:
    bucket: Bucket = run.reader.bucket
    follower = Follower(RunReader(bucket, "told"), vllm, name="r", folder=tmp_path / "r", poll_s=HOUR)
    follower.start()
    wait_until_serving(follower, 0)
    yield follower
    follower.stop()


@pytest.mark.full
def test_the_hubs_events_bring_each_version(hub_env, follower, run, vllm) -> None:
    soon(lambda: follower.report(0).notice == "notified by the store", "a connection")
    for version in (1, 2):
        run.step()
        wait_until_serving(follower, version)
    assert vllm.digest() == run.reader.manifest(2).digest


@pytest.mark.parametrize(("answered_s", "clock_s"), [(0.5, 0.0), (0.0, -HOUR)], ids=["late", "another clock"])
def test_the_lag_ends_when_the_weights_are_live(
    follower, run, vllm, monkeypatch, answered_s, clock_s
) -> None:
    """The follower may have vLLM's answer only later. A worker's clock may be another host's. A poke brings
    the version, as the follower polls once an hour."""

    def take(*version: Any) -> tuple[float, ...]:
        *seconds, live_at = InMemoryVllm.take(vllm, *version)
        time.sleep(answered_s)
        return *seconds, live_at + clock_s

    monkeypatch.setattr(vllm, "take", take)
    run.step()
    follower.poke()
    wait_until_serving(follower, 1)
    (commit,) = follower.report(0).commits
    assert 0 <= commit.lag_s <= max(0, commit.t + clock_s - run.reader.manifest(1).created_at - answered_s)


PAIR = new_pair()
PARALLEL = {"data_parallel_size": 1, "enable_eplb": False, "world_size": 1}


@pytest.fixture
def another_vllm(monkeypatch):
    """One in which every import but its own fails."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))


@pytest.mark.parametrize("asked_for", [None, "", "someone_elses", "lora_filesystem_resolver,someone_elses"])
def test_a_vllm_that_does_not_ask_for_it_is_left_alone(another_vllm, monkeypatch, asked_for):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked_for is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked_for)
    plugin.register()


@pytest.mark.parametrize("asked_for", ["delta_weight_sync", "someone_elses,delta_weight_sync"])
def test_one_that_does_and_cannot_be_used_is_told(another_vllm, monkeypatch, asked_for):
    monkeypatch.setenv("VLLM_PLUGINS", asked_for)
    monkeypatch.setattr(compat, "installed", lambda package: compat.Release("vllm", ""))
    with pytest.raises(CompatibilityError, match=r"pip install '\.\[vllm\]' in the checkout"):
        plugin.register()


@pytest.mark.parametrize(
    ("part", "option", "sentence"),
    [
        (
            "parallel_config",
            {"data_parallel_size": 2},
            "a mixture of experts with --data-parallel-size cannot take commits, because its engines compute"
            " each step together; start one replica for each engine instead",
        ),
        ("parallel_config", {"enable_eplb": True}, "--enable-eplb moves experts away"),
        ("model_config", {"enable_sleep_mode": True}, "--enable-sleep-mode takes the weights away"),
        ("lora_config", {"max_loras": 1}, "--enable-lora wraps layers"),
        ("offload_config", {"prefetch": SimpleNamespace(offload_group_size=2)}, "--offload-group-size moves"),
    ],
)
def test_options_that_move_weights_are_refused(part, option, sentence):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**PARALLEL),
        model_config=SimpleNamespace(enable_sleep_mode=False, quantization=None),
        lora_config=None,
        speculative_config=None,
        offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=0)),
    )
    kept = vars(getattr(config, part) or SimpleNamespace())
    setattr(config, part, SimpleNamespace(**kept | option))
    answer = call(SimpleNamespace(vllm_config=config), "learn", shapes={})
    assert answer["error"].startswith(sentence)
    assert answer["kind"] == "route"


def test_a_vllm_that_follows_is_given_the_public_half_of_a_key_and_no_other():
    run = {f"{PREFIX}RUN": "file:///b#a"}
    settings = settings_from(run | {PUBLIC_KEY: PAIR[PUBLIC_KEY]})
    assert settings.public_key == PAIR[PUBLIC_KEY]
    for name, said in ((SIGNING_KEY, "only the trainer may have it"), (PUBLIC_KEY, "is not a key")):
        with pytest.raises(SettingsError, match=said) as refusal:
            settings_from(run | {name: PAIR[SIGNING_KEY]})
        assert PAIR[SIGNING_KEY][15:] not in str(refusal.value)


class Slow(FileBucket):
    """A bucket on a slow link: half of the weights come, the rest when it is let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True)
        self.halfway = threading.Event()
        self.go_on = threading.Event()

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        content = self.get(key)
        with replacing(dest) as part:
            part.write_bytes(content[: len(content) // 2])
            if key.endswith("model.safetensors"):
                self.halfway.set()
                self.go_on.wait(PATIENCE_S)
            part.write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def for_ever(*_: object) -> None:
    """An engine that takes for ever to start."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    child.join()
    raise RuntimeError("the engine ended")


@pytest.fixture
def bucket(tmp_path: Path) -> Slow:
    return Slow((tmp_path / "bucket").as_uri())


@pytest.fixture
def joining(bucket: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr("inference_space.vllm_server.VllmServer._arguments", for_ever)
    run = RealRun(open_bucket(bucket.url), run="joined", width=256)
    settings = Settings(bucket=bucket.url, run="joined", folder=str(tmp_path / "replica"))
    vllm = VllmServer(settings)
    reader = RunReader(bucket, "joined")
    joining = Follower(reader, vllm, name="r", folder=tmp_path, poll_s=1.0)
    joining.start()
    yield joining
    bucket.go_on.set()
    joining.stop()
    run.close()


def state(joining: Follower) -> str:
    return joining.report(0).status.state


def test_it_says_how_much_has_come_and_what_it_does_next(bucket: Slow, joining: Follower) -> None:
    assert bucket.halfway.wait(PATIENCE_S)
    assert state(joining) == "fetching version 0: 3.1 of 6.3 MB", "in tenths of the whole"
    bucket.go_on.set()
    soon(lambda: state(joining) == "starting vLLM with version 0", "a start")


def test_it_ends_while_vllm_starts(bucket: Slow, joining: Follower) -> None:
    bucket.go_on.set()
    soon(lambda: bool(multiprocessing.active_children()), "an engine")
    joining.stop()
    assert multiprocessing.active_children() == []
