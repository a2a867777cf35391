"""A replica's work on a device, on tensors of the host: exact, and as many calls for a model of any shape."""

import contextlib
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_weight_sync import gpu
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import gpu as device_memory
from delta_weight_sync.vllm import memory as memory_module
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.routes import Geometry, Piece, Route
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks, Staged
from tests.gpu.on_host import Devices, Operations
from tests.support.live_weights import delta, live, load

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


def test_a_tensor_with_more_elements_than_a_row_can_number(tmp_path, monkeypatch):
    """2^31 in truth."""
    monkeypatch.setattr(memory_module, "MOST", 1000)
    rng = np.random.default_rng(2)
    views: Views = {"flat": ((4096,), (0,)), "turned": ((64, 70), (1, 0))}
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, (shape, _) in views.items()}
    new = {name: np.roll(bits, 1) for name, bits in old.items()}
    commits_and_takes_back(tmp_path, Laid(views), old, new)


def test_changes_and_rows_are_cut_into_parts_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "HASHED", 1000)
    monkeypatch.setattr(gpu, "CHANGES", 100)
    rng = np.random.default_rng(5)
    views: Views = {"flat": ((9001,), (0,)), "turned": ((48, 70), (1, 0))}
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, (shape, _) in views.items()}
    new = {name: np.where(rng.random(b.shape) < 0.4, b + 9, b).astype(np.uint16) for name, b in old.items()}
    commits_and_takes_back(tmp_path, Laid(views), old, new)


@pytest.mark.parametrize("free", [1 << 30, 0], ids=["on the device", "in pinned memory"])
def test_staged_data_leaves_the_engine_half_of_the_free_memory(tmp_path, monkeypatch, free):
    """Else it stays on the host; a commit and an undo then need only buffers that exist."""
    monkeypatch.setattr(gpu, "free_bytes", lambda device: free)
    monkeypatch.setattr(gpu, "CHANGES", 100)
    rng = np.random.default_rng(6)
    views: Views = {"flat": ((5000,), (0,)), "turned": ((48, 70), (1, 0))}
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, (shape, _) in views.items()}
    asked = list[int]()
    room = gpu.room
    monkeypatch.setattr(gpu, "room", lambda shape, *rest: (asked.append(shape[0]), room(shape, *rest))[1])
    commits_and_takes_back(tmp_path, Laid(views), old, {name: bits + 1 for name, bits in old.items()})
    assert asked.count(5000 + 48 * 70) == (2 if free else 5)


def model_of(sizes: list[int], parameters: int) -> LiveWeights:
    """A model of tensors of these sizes, which lie in so many parameters of vLLM."""
    memories = [torch.zeros(sum(sizes[first::parameters]), dtype=torch.int16) for first in range(parameters)]
    routes = {}
    used = [0] * parameters
    for i, size in enumerate(sizes):
        which = i % parameters
        place = slice(used[which], used[which] + size)
        whole = Geometry(0, (size,), (1,))
        routes[f"w{i}"] = Route((size,), (Piece(memories[which][place], whole, whole),))
        used[which] = place.stop
    return LiveWeights(routes, dict.fromkeys(routes, (0,)), Fallback(torch.nn.Module(), {}), Ranks(1))


def cost(folder: Path, sizes: list[int], parameters: int) -> dict[str, tuple[Counter[str], int]]:
    """How often torch runs each operation, and the host waits, in each part of a sync."""
    weights = model_of(sizes, parameters)
    old = {f"w{i}": np.zeros(size, np.uint16) for i, size in enumerate(sizes)}
    new = {name: np.ones(bits.size, np.uint16) for name, bits in old.items()}
    path = delta(folder / "delta", old, new)
    counted = {}
    with Operations() as digest:
        assert weights.digest() == state_digest(old)
    counted["digest"] = digest.by_name, digest.waits
    with Operations() as stage:
        staged = weights.stage([path], known=0)
    counted["stage"] = stage.by_name, stage.waits
    with Operations() as commit:
        worker.commit(staged.steps, Ranks(1))
    counted["commit"] = commit.by_name, commit.waits
    with Operations() as undo:
        staged.steps[1].undo()
    counted["undo"] = undo.by_name, undo.waits
    return counted


@pytest.mark.full
def test_a_sync_takes_as_many_launches_and_waits_whatever_the_number_of_tensors(tmp_path):
    few = cost(tmp_path, [2000] * 10, 5)
    many = cost(tmp_path, [1] * 20_000, 5)
    assert few["stage"] == many["stage"]
    assert few["commit"] == many["commit"]
    assert few["undo"] == many["undo"]
    assert (few["stage"][1], few["commit"][1], few["undo"][1]) == (1, 3, 3)
    # Slices of a model are hashed one after the other, on a host as on a GPU.
    assert many["digest"][0].total() <= memory_module.SLICES * 30
    assert many["digest"][1] <= memory_module.SLICES


def test_a_commit_takes_two_more_launches_for_each_parameter_of_vllm(tmp_path):
    five, fifty = (cost(tmp_path, [20] * 1000, parameters)["commit"] for parameters in (5, 50))
    assert fifty[1] == five[1]
    assert fifty[0] - five[0] == {"aten::index_put_": 45, "aten::index_select": 45}


def test_staging_has_a_stream_of_its_own_and_a_commit_is_on_vllms(tmp_path, monkeypatch):
    inside = list[bool]()
    entered = [False]

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
    get = device_memory._get
    monkeypatch.setattr(device_memory, "_get", lambda *given: (inside.append(entered[0]), get(*given))[1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    weights.memory._stream = object()
    staged = weights.stage([delta(tmp_path / "delta", old, {"w": np.roll(old["w"], 1)})], weights.digest())
    assert set(inside) == {True}
    inside.clear()
    worker.commit(staged.steps, Ranks(1))
    assert set(inside) == {False}


def test_rank_1_uses_device_1_in_every_thread(tmp_path, monkeypatch):
    """In those that warm up, stage and hash again, which begin with device 0, and in vLLM's own."""
    devices = Devices()
    seen = dict[str, set[int]]()

    class Watch(Operations):
        def __torch_dispatch__(self, function, *given, **more):
            if not function.is_view:  # a view is no work
                seen.setdefault(threading.current_thread().name, set()).add(devices.current)
            return super().__torch_dispatch__(function, *given, **more)

    class Watched(threading.Thread):
        def run(self):
            with Watch():
                super().run()

    def memory_of(table):
        made = device_memory.DeviceMemory(table)
        made._device = torch.device("cpu", 1)
        return made

    rng = np.random.default_rng(7)
    old = {"w": rng.integers(0, 65536, (64, 64)).astype(np.uint16)}
    new = {"w": np.roll(old["w"], 1)}
    model = load(Laid({"w": ((64, 64), (1, 0))}), old)
    monkeypatch.setattr(torch.accelerator, "device_index", devices.on)
    monkeypatch.setattr(worker, "Thread", Watched)
    monkeypatch.setattr(worker, "memory_of", memory_of)
    monkeypatch.setattr(worker.DeltaWorker, "_device", torch.device("cpu", 1))
    one = object.__new__(worker.DeltaWorker)  # without a vLLM
    one._ranks = Ranks(1)
    one._model = model
    one._staged = Staged()
    one._digest = state_digest(old)
    one.warm()
    assert one.staging.result()["done"]
    with devices.on(1):  # vLLM sets the device of its own thread
        one.weights = live(model, model.shapes)
        one.weights.digest()
    one.stage([str(delta(tmp_path / "delta", old, new))])
    assert one.staging.result()["done"]
    with Watch(), devices.on(1):
        one.commit(to_hex(state_digest(new)), "1.1.1")
    hashed = Watched(target=one.weights.memory.recheck, name="recheck")
    hashed.start()
    hashed.join()
    assert seen == {name: {1} for name in ("warm", "stage", "MainThread", "recheck")}
    assert (model.state()["w"] == new["w"]).all()
