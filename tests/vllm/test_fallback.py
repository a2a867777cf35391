"""Tensors without a route are loaded again by vLLM's own loader: as a fresh start does, and undone."""

from unittest import mock

import numpy as np
import pytest
import torch

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, write_bits
from delta_weight_sync.digest import state_digest
from delta_weight_sync.vllm import routes, worker
from delta_weight_sync.vllm.worker import Fallback
from tests.support.live_weights import load

SHAPES = {"scale": (6, 4), "left": (4, 4), "right": (4, 4)}


class Model(torch.nn.Module):
    """Squares one tensor, in place, and joins two others once it has both."""

    def __init__(self) -> None:
        super().__init__()
        self.squared = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.joined = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        waiting = {}
        for name, tensor in weights:
            if name == "scale":
                self.squared.copy_(tensor.mul_(tensor))
            else:
                waiting[name] = tensor
        if len(waiting) == 2:
            self.joined.copy_(torch.cat([waiting["left"], waiting["right"]]))


def random_state(seed: int) -> dict[str, codec.Bits]:
    rng = np.random.default_rng(seed)
    values = {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    return {name: value.to(torch.bfloat16).view(torch.uint16).numpy() for name, value in values.items()}


def memory(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def diff(old: dict[str, codec.Bits], new: dict[str, codec.Bits]) -> list[codec.Patch]:
    return [codec.diff(name, old[name], new[name]) for name in SHAPES]


@pytest.fixture
def loaded():
    state = random_state(0)
    model = load(Model(), state)
    return model, state, Fallback(model, state)


def test_none_of_these_has_a_route(loaded):
    learned = routes.learn(loaded[0], SHAPES)
    _, unroutable = routes.ownership(SHAPES, [learned.sources])
    assert set(unroutable) == set(SHAPES)


def test_a_commit_is_what_a_fresh_start_loads_and_an_undo_brings_all_back(loaded):
    model, state, fallback = loaded
    before = memory(model)
    after = random_state(1)
    reload, moved = fallback.stage(diff(state, after))
    assert memory(model) == before, "staging writes nothing"
    assert (state_digest(state) + moved) % 2**64 == state_digest(after)

    reload.do()
    assert memory(model) == memory(load(Model(), after))
    assert all(np.array_equal(fallback.bits[name], after[name]) for name in SHAPES)

    reload.undo()
    assert memory(model) == before
    assert all(np.array_equal(fallback.bits[name], state[name]) for name in SHAPES)


def test_one_changed_tensor_brings_its_partner_along(loaded):
    """The loader writes `joined` only when it has both halves."""
    model, state, fallback = loaded
    after = {**state, "left": random_state(1)["left"]}
    fallback.stage([codec.diff("left", state["left"], after["left"])])[0].do()
    assert memory(model) == memory(load(Model(), after))


def test_an_undo_after_a_failure_brings_all_back(loaded, monkeypatch):
    model, state, fallback = loaded
    before = memory(model)
    reload, _ = fallback.stage(diff(state, random_state(1)))
    whole = Model.load_weights

    def half(self, weights) -> None:
        self.squared.copy_(next(iter(weights))[1])
        raise OSError("out of memory")

    monkeypatch.setattr(Model, "load_weights", half)
    with pytest.raises(OSError, match="out of memory"):
        reload.do()
    monkeypatch.setattr(Model, "load_weights", whole)
    reload.undo()
    assert memory(model) == before


@pytest.mark.parametrize(
    ("squared", "sentence"),
    [
        (torch.full((6, 4), 3.0), "loading scale, left, right again changed squared"),
        (torch.zeros(2, 2), "vLLM cannot reload scale, left, right"),
    ],
    ids=["changed after loading", "cannot load again"],
)
def test_a_model_that_loading_does_not_restore_is_refused(squared, sentence):
    state = random_state(0)
    model = load(Model(), state)
    model.squared = torch.nn.Parameter(squared, requires_grad=False)
    with pytest.raises(routes.RouteError, match=sentence):
        Fallback(model, state)


def test_to_learn_again_keeps_what_commits_have_made_of_the_tensors(loaded, tmp_path):
    model, state, _ = loaded
    write_bits({name: bits.shape for name, bits in state.items()}, state.__getitem__, tmp_path / WEIGHTS)
    learning = object.__new__(worker.DeltaWorker)  # without a vLLM
    learning._model, learning._ranks, learning._rechecks = model, worker.Ranks(1), mock.ANY
    learning._config = mock.Mock(**{"model_config.model": str(tmp_path)})
    learning.learn(SHAPES)
    learning.weights._fallback.stage(diff(state, random_state(1)))[0].do()
    learning.learn(SHAPES)
    assert memory(model) == memory(load(Model(), random_state(1)))


def test_a_commit_without_changes_loads_nothing(loaded):
    model, _, fallback = loaded
    model.squared.zero_()
    fallback.stage([])[0].do()
    assert not model.squared.any()
