"""Engines in the process of the weights, where a fault must come at a moment that no real engine shows.

tests/live/test_sglang.py and tests/cli/test_serve.py run the real ones.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError, EngineError
from delta_weight_sync.local_engine import LocalEngine
from delta_weight_sync.sglang import plugin
from delta_weight_sync.sglang.engine import SglangEngine
from delta_weight_sync.sglang.replica import refusal
from delta_weight_sync.vllm import memory, routes
from tests.support.live_weights import State, delta, load
from tests.support.waiting import soon


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(40, 8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors: Any) -> None:
        for _, tensor in tensors:
            self.weight.data.copy_(tensor)


class Engine(LocalEngine):
    what = "an engine"

    def __init__(self, state: State) -> None:
        super().__init__("old")
        self._model = load(Model(), state)
        self.refuses_labels = False

    def alive(self) -> bool:
        return True

    def describe(self) -> str:
        return self.what

    def model(self) -> torch.nn.Module:
        return self._model

    def find(self, shapes: Any, dtypes: Any) -> Any:
        learned = routes.learn(self._model, shapes, dtypes)
        (owned,), _ = routes.ownership(shapes, [learned.sources])
        return learned.routes, owned

    def between_steps(self, call: Callable[[], Any]) -> Any:
        return call()

    def set_label(self, label: str) -> None:
        if self.refuses_labels and label == "new":
            raise RuntimeError("no label")
        super().set_label(label)

    def live(self) -> np.ndarray:
        return self._model.weight.data.view(torch.int16).numpy().copy()


@pytest.fixture
def old() -> State:
    return {"weight": np.random.default_rng(0).integers(0, 30000, (40, 8)).astype(np.uint16)}


@pytest.fixture
def new(old) -> State:
    return {"weight": old["weight"] + np.uint16(3)}


@pytest.fixture
def engine(old) -> Engine:
    engine = Engine(old)
    assert engine.learn({"weight": [40, 8]}, {}) == to_hex(state_digest(old))
    return engine


def test_a_version_is_taken_and_a_checkpoint_leads_back(engine, old, new, tmp_path):
    engine.take([delta(tmp_path / "delta", old, new)], to_hex(state_digest(new)), "new")
    assert (engine.live().view(np.uint16) == new["weight"]).all()
    assert engine.label == "new"
    write_bits({"weight": (40, 8)}, old.__getitem__, tmp_path / "model.safetensors")
    engine.take_checkpoint(tmp_path, to_hex(state_digest(old)), "old")
    assert (engine.live().view(np.uint16) == old["weight"]).all()


@pytest.mark.parametrize("fault", ["a write", "the label", "the digest"])
def test_weights_and_label_are_as_before_if_anything_fails(engine, old, new, tmp_path, monkeypatch, fault):
    before = engine.live()
    wanted = to_hex(state_digest(new))
    if fault == "a write":
        put = memory._put
        monkeypatch.setattr(memory, "_put", lambda *changes: put(*changes) + 1)
    elif fault == "the label":
        engine.refuses_labels = True
    else:
        wanted = "0" * 16
    path = delta(tmp_path / "delta", old, new)
    with pytest.raises((EngineError, RuntimeError)) as failed:
        engine.take([path], wanted, "new")
    if fault != "the label":
        assert failed.value.kind == CodecError.kind, "the follower then joins"
    assert (engine.live() == before).all()
    assert engine.label == "old"
    monkeypatch.undo()
    engine.refuses_labels = False
    engine.take([path], to_hex(state_digest(new)), "new")
    assert (engine.live().view(np.uint16) == new["weight"]).all(), "the next try works"


def step(begins: bool) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: begins))


def request(*, holds: bool = False, retracted: int = 0, key: str | None = None) -> Any:
    return SimpleNamespace(kv=SimpleNamespace(holds_kv=holds), retraction_count=retracted, extra_key=key)


def scheduler(*waiting: Any) -> Any:
    return SimpleNamespace(
        result_queue=[],
        waiting_queue=[*waiting],
        grammar_manager=SimpleNamespace(grammar_queue=[]),
    )


def test_sglang_runs_calls_only_while_no_step_is_under_way_or_has_begun():
    ran = threading.Event()
    overlapping = scheduler()
    engine = SglangEngine(overlapping, "default")
    overlapping.result_queue.append("a step")
    assert not engine.ends_step(step(begins=False)), "no call waits"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(engine.between_steps, ran.set)
        soon(lambda: engine.ends_step(step(begins=False)), "a call waits")
        assert engine.ends_step(None)
        assert not engine.ends_step(step(begins=True)), "its requests have found their prefixes"
        engine.run_calls()
        engine.run_calls(step(begins=False))
        overlapping.result_queue.clear()
        engine.run_calls(step(begins=True))
        assert not ran.is_set()
        engine.run_calls(step(begins=False))
        done.result(60)
    assert ran.is_set()


def test_sglang_gives_new_keys_to_requests_that_have_not_begun():
    fresh, theirs = request(), request(key="mine")
    running, put_back = request(holds=True, key="old"), request(retracted=1, key="old")
    engine = SglangEngine(scheduler(fresh, theirs, running, put_back), "default")
    assert engine.keyed(request()).extra_key is None, "before the first version, nothing changes"
    engine.forget_prefixes()
    first = fresh.extra_key
    assert first
    assert theirs.extra_key == f"{first}mine"
    assert (running.extra_key, put_back.extra_key) == ("old", "old")
    assert engine.keyed(request(key="mine")).extra_key == f"{first}mine"
    engine.forget_prefixes()
    assert fresh.extra_key != first
    assert theirs.extra_key == f"{fresh.extra_key}mine"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, ""),
        ({"tp_size": 1, "disable_overlap_schedule": False}, ""),
        ({"tp_size": 2}, "with --tp-size 2, this SGLang cannot take commits: start it without"),
        ({"enable_lora": True}, "with --enable-lora True, this SGLang cannot take commits: start it without"),
        (
            {"quantization": "fp8"},
            "with --quantization fp8, this SGLang cannot take commits: start it without",
        ),
    ],
)
def test_sglang_options_that_rule_out_commits_are_named(options, sentence):
    assert refusal(options) == sentence


def test_the_plugin_for_sglang_follows_only_if_a_run_is_named(monkeypatch):
    monkeypatch.delenv("DELTA_WEIGHT_SYNC_RUN", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    plugin.register()
    monkeypatch.setenv("DELTA_WEIGHT_SYNC_RUN", Path("bucket").absolute().as_uri())
    with pytest.raises(SystemExit, match="delta_weight_sync: "):
        plugin.register()
