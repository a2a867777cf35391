"""A replica's kernels, interpreted on tensors of the host: exact, and as many for a model of any shape."""

import contextlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import WEIGHTS, write_bits
from delta_weight_sync.digest import state_digest
from delta_weight_sync.gpu import used
from delta_weight_sync.vllm import memory as memory_module
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.routes import Geometry, Piece, Route
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks
from tests.gpu.interpreted import Operations, interpreted
from tests.support.live_weights import delta, live, load

device_memory = interpreted("delta_weight_sync.vllm.gpu")
Views = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


class Laid(torch.nn.Module):
    """Each tensor in a parameter of its own, with its dimensions in another order and room around it."""

    def __init__(self, views: Views) -> None:
        """`views`: name -> (shape, order of its dimensions in memory)."""
        super().__init__()
        self.views, self.shapes = views, {name: shape for name, (shape, _) in views.items()}
        for name, (shape, order) in views.items():
            memory = torch.zeros([shape[dim] for dim in order], dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(memory, requires_grad=False))

    def of(self, name: str) -> torch.Tensor:
        """The parameter in the tensor's own order of dimensions."""
        order = self.views[name][1]
        return self.get_parameter(name).data.permute([order.index(dim) for dim in range(len(order))])

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.of(name).copy_(tensor)

    def state(self) -> dict[str, np.ndarray]:
        return {
            name: self.of(name).contiguous().view(torch.int16).numpy().view(np.uint16) for name in self.views
        }


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    monkeypatch.setattr(worker, "memory_of", device_memory.DeviceMemory)


def commits_and_takes_back(
    folder: Path, model: Laid, old: dict[str, np.ndarray], new: dict[str, np.ndarray]
) -> None:
    weights = live(load(model, old), model.shapes)
    assert weights.digest() == state_digest(old)
    staged = weights.stage([delta(folder / "delta", old, new)], state_digest(old))
    assert staged.digest == state_digest(new)
    worker.commit(staged.steps, Ranks(1))
    assert all((bits == new[name]).all() for name, bits in model.state().items())
    assert weights.digest() == staged.digest
    for step in reversed(staged.steps):
        step.undo()
    assert all((bits == old[name]).all() for name, bits in model.state().items())


@pytest.mark.parametrize("share", [0.01, 0.9], ids=["some", "most"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((5000,), (0,)),
        ((48, 160), (1, 0)),
        ((40, 33), (1, 0)),
        ((3, 32, 64), (2, 0, 1)),
        ((7, 5, 6, 4, 9), (4, 2, 0, 3, 1)),  # more dimensions than a row of the table has
    ],
    ids=str,
)
def test_any_layout(tmp_path, shape, order, share):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 65536, shape).astype(np.uint16)
    new = np.where(rng.random(shape) < share, rng.integers(0, 65536, shape), old).astype(np.uint16)
    commits_and_takes_back(tmp_path, Laid({"w": (shape, order)}), {"w": old}, {"w": new})


@pytest.mark.full
def test_a_tensor_with_more_elements_than_a_row_can_number(tmp_path, monkeypatch):
    """2^31 in truth."""
    monkeypatch.setattr(memory_module, "MOST", 1000)
    rng = np.random.default_rng(2)
    views: Views = {"flat": ((4096,), (0,)), "turned": ((64, 70), (1, 0))}
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, (shape, _) in views.items()}
    new = {name: np.roll(bits, 1) for name, bits in old.items()}
    commits_and_takes_back(tmp_path, Laid(views), old, new)


def test_nothing_is_compiled_after_learning(tmp_path, monkeypatch):
    """Not in a stage, a join, a pause or an undo: each launch has a program that learning has launched."""
    compiled, plain = [], device_memory.launch

    def launch(kernel, programs, *arguments, **constants):
        kinds = [(a.dtype, a.data_ptr() % 16) if torch.is_tensor(a) else type(a) for a in arguments]
        if programs:
            compiled.append(f"{kernel.__name__} {kinds} {constants}")  # what Triton compiles for
        plain(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(device_memory, "launch", launch)
    worker.warm_up(torch.device("cpu"))
    warm = set(compiled)
    rng, (old, new) = np.random.default_rng(4), ({}, {})
    model = Laid({"flat": ((9001,), (0,)), "turned": ((48, 160), (1, 0)), "odd": ((7, 5, 6), (2, 0, 1))})
    for name, shape in model.shapes.items():
        old[name] = rng.integers(0, 65536, shape).astype(np.uint16)
        new[name] = np.where(rng.random(shape) < (0.9 if name == "odd" else 0.01), old[name] + 1, old[name])
    weights = live(load(model, old), model.shapes)
    weights.digest()
    learned = set(compiled)
    assert learned == warm, "learning stops generation, so nothing is compiled there either"
    staged = weights.stage([delta(tmp_path / "delta", old, new)], state_digest(old))
    worker.commit(staged.steps, Ranks(1))
    write_bits(model.shapes, old.__getitem__, tmp_path / WEIGHTS)
    joined = weights.stage_checkpoint(tmp_path)
    worker.commit(joined.steps, Ranks(1))
    for step in reversed(joined.steps):
        step.undo()
    assert weights.digest() == state_digest(new)
    assert set(compiled) == learned


@pytest.mark.parametrize("tensors", [10, 20_000])
def test_a_sync_takes_as_many_launches_and_waits_whatever_the_number_of_tensors(
    tmp_path, monkeypatch, tensors
):
    """Counted where all launches pass; what they compute is the other tests' matter."""
    sizes = [5000, *[1_280_000 // tensors] * (tensors - 1)]  # a tensor with every kind of tile in both
    parts = torch.zeros(sum(sizes), dtype=torch.int16).split(sizes)
    whole = [Geometry(0, (size,), (1,)) for size in sizes]
    pieces = [Piece(*piece) for piece in zip(parts, whole, whole, strict=True)]
    routes = {f"w{i}": Route((size,), (pieces[i],)) for i, size in enumerate(sizes)}
    old = {f"w{i}": np.zeros(size, np.uint16) for i, size in enumerate(sizes)}
    new = {name: (np.arange(bits.size) % 64 == 5).astype(np.uint16) for name, bits in old.items()}
    plain = device_memory.launch
    nothing = mock.MagicMock()  # a kernel
    monkeypatch.setattr(device_memory, "launch", lambda _, programs, *__, **___: plain(nothing, programs))
    weights = LiveWeights(routes, dict.fromkeys(routes, (0,)), Fallback(torch.nn.Module(), {}), Ranks(1))
    path = delta(tmp_path / "delta", old, new)
    used.clear()
    with Operations() as stage:
        staged = weights.stage([path], known=0)
    assert (used["launches"], used["waits"], stage.count) == (3, 2, 7)
    used.clear()
    with Operations() as commit:
        worker.commit(staged.steps, Ranks(1))
    assert (used["launches"], used["waits"], commit.count) == (2, 2, 2)


def test_staging_has_a_stream_of_its_own_and_a_commit_is_on_vllms(tmp_path, monkeypatch):
    inside, entered = list[bool](), [False]

    @contextlib.contextmanager
    def stream(ours):
        assert ours is weights.memory._stream
        entered[0] = True
        yield
        entered[0] = False

    rng = np.random.default_rng(3)
    old = {"w": rng.integers(0, 65536, (64, 64)).astype(np.uint16)}
    model = load(Laid({"w": ((64, 64), (0, 1))}), old)
    weights = live(model, model.shapes)
    plain = device_memory.launch
    monkeypatch.setattr(device_memory, "launch", lambda *a, **k: (inside.append(entered[0]), plain(*a, **k)))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    weights.memory._stream = object()
    staged = weights.stage([delta(tmp_path / "delta", old, {"w": np.roll(old["w"], 1)})], weights.digest())
    assert set(inside) == {True}
    inside.clear()
    worker.commit(staged.steps, Ranks(1))
    assert set(inside) == {False}
