"""Staging and committing on live memory: exact for any layout, put back bit for bit when anything fails."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_weight_sync.checkpoint import WEIGHTS, write_bits
from delta_weight_sync.digest import state_digest
from delta_weight_sync.errors import CodecError, WeightsChangedError
from delta_weight_sync.vllm import gpu as device_memory
from delta_weight_sync.vllm import memory as memory_module
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.memory import Changes, Step
from delta_weight_sync.vllm.routes import Geometry, Piece, Route
from delta_weight_sync.vllm.worker import DeltaWorker, Fallback, LiveWeights, Ranks, Staged
from tests.support.live_weights import delta, live, load

SHAPES = {"q": (6, 8), "k": (3, 8), "v": (3, 8), "out": (8, 6), "norm": (8,)}


class Model(torch.nn.Module):
    """Lays tensors out as vLLM's models do: q, k and v fused, `out` transposed, `norm` in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16))
        self.out = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        self.norm_twin = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "out":
                self.out.copy_(tensor.t())
            elif name == "norm":
                self.norm.copy_(tensor)
                self.norm_twin.copy_(tensor)
            else:
                first = {"q": 0, "k": 6, "v": 9}[name]
                self.qkv[first : first + len(tensor)].copy_(tensor)

    def memory(self) -> list[np.ndarray]:
        return [p.detach().view(torch.int16).numpy().copy() for p in self.parameters()]


def random_state(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in SHAPES.items()}


def moved(rng: np.random.Generator, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    share = rng.choice([0.02, 0.3, 1.0])
    return {
        name: np.where(rng.random(bits.shape) < share, rng.integers(0, 65536, bits.shape), bits).astype(
            np.uint16
        )
        for name, bits in state.items()
    }


@pytest.fixture(autouse=True, params=["host", "threads", "device"])
def memory(request, monkeypatch):
    """Each test on all: with one thread, with several, and as on a GPU."""
    if request.param == "threads":
        monkeypatch.setattr("delta_weight_sync.util.THREADS", 3)
        monkeypatch.setattr(memory_module, "_SHARED", 1)
    kind = device_memory.DeviceMemory if request.param == "device" else memory_module.HostMemory
    monkeypatch.setattr(worker, "memory_of", kind)
    return kind


def assert_same(model: Model, state: dict[str, np.ndarray]) -> None:
    for mine, fresh in zip(model.memory(), load(Model(), state).memory(), strict=True):
        np.testing.assert_array_equal(mine, fresh)


def failing(write: Step) -> Step:
    """A write of which something goes wrong once it is done."""
    return Step(lambda: (write.do()[0] + 1, 0.0), write.undo)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def state(rng):
    return random_state(rng)


@pytest.fixture
def model(state):
    return load(Model(), state)


@pytest.fixture
def weights(model):
    return live(model, SHAPES)


@pytest.mark.parametrize("deltas", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.full
def test_many_deltas_with_undos_between_them_leave_what_a_fresh_load_would(
    tmp_path, deltas, rng, state, model, weights
):
    path = tmp_path / "delta.safetensors"
    known = weights.digest()
    assert known == state_digest(state)
    for turn in range(deltas):
        new = moved(rng, state)
        encoding = ("fast", "small")[turn % 2]
        staged = weights.stage([delta(path, state, new, encoding)], known)
        assert staged.digest == state_digest(new)
        if turn % 4 == 0:
            with pytest.raises(CodecError, match="read back differently"):
                worker.commit([*map(failing, staged.steps)], Ranks(1))
            assert_same(model, state)
            assert weights.digest(known=True) == weights.digest() == known
        worker.commit(staged.steps, Ranks(1))
        state = new
        known = staged.digest
        assert weights.digest(known=True) == weights.digest() == known
    assert_same(model, state)


def test_several_deltas_are_staged_as_one(tmp_path, rng, state, model, weights):
    states = [state]
    for _ in range(4):
        states.append(moved(rng, states[-1]))
    paths = [
        delta(tmp_path / f"{i}.safetensors", states[i], states[i + 1], ("small", "fast")[i % 2], i)
        for i in range(4)
    ]
    staged = weights.stage(paths, weights.digest())
    worker.commit(staged.steps, Ranks(1))
    assert_same(model, states[-1])


def test_a_failure_in_the_middle_of_the_writing_is_put_back(
    tmp_path, monkeypatch, rng, state, model, weights
):
    staged = weights.stage([delta(tmp_path / "d", state, moved(rng, state))], weights.digest())
    reload, write = staged.steps
    put = memory_module._put
    put_there = device_memory._put

    def half() -> tuple[int, float]:
        before = weights.digest()
        with monkeypatch.context() as only_here:
            only_here.setattr(
                memory_module, "_put", lambda rows, blocks, *rest: put(rows, blocks[::2], *rest)
            )
            only_here.setattr(
                device_memory, "_put", lambda runs, *rest: put_there(runs[: len(runs) // 2], *rest)
            )
            write.do()
        assert weights.digest() not in (before, staged.digest)
        raise MemoryError("device lost")

    with pytest.raises(MemoryError):
        worker.commit([reload, Step(half, write.undo)], Ranks(1))
    assert_same(model, state)
    worker.commit(staged.steps, Ranks(1))
    assert weights.digest() == staged.digest


def test_a_commit_says_when_all_was_written() -> None:
    written: list[float] = []

    def write() -> tuple[int, float]:
        time.sleep(0.1)
        written.append(time.time())
        return 0, 0.0

    committing = object.__new__(DeltaWorker)  # without a vLLM
    committing._ranks, committing._staged = Ranks(1), Staged(0, [Step(write, write)])
    live_at = committing.commit("0" * 16, "1.1.1")["live_at"]
    assert written[0] <= live_at <= time.time()


def test_weights_that_someone_else_changed_are_noticed_before_anything_is_written(
    tmp_path, rng, state, model, weights
):
    known = weights.digest()
    path = delta(tmp_path / "d", state, moved(rng, state))
    with torch.no_grad():
        model.qkv[7, 3] += 1
    for _ in range(memory_module.SLICES):  # what a minute brings
        weights.memory.recheck()
    before = model.memory()
    with pytest.raises(WeightsChangedError, match="something else changed the live weights"):
        weights.stage([path], known)
    assert all((a == b).all() for a, b in zip(before, model.memory(), strict=True))


def test_a_delta_of_another_base_does_not_lead_to_its_digest(tmp_path, rng, weights):
    other = random_state(rng)
    new = moved(rng, other)
    staged = weights.stage([delta(tmp_path / "d", other, new)], weights.digest())
    assert staged.digest != state_digest(new)


def test_a_write_that_did_not_take_is_counted(weights):
    """No delta names an element twice; if one did, the reading back would tell."""
    counts = np.array([0]), np.array([3])
    twice = Changes(*counts, np.array([3, 7, 7], np.int32), np.array([1, 2, 3], np.uint16))
    write, _ = weights.memory.prepare(twice)
    assert write.do()[0] == 1


@pytest.mark.parametrize("batch", [worker._BATCH, 7])
def test_a_checkpoint_is_staged_from_whatever_is_live(tmp_path, monkeypatch, batch, rng, model, weights):
    monkeypatch.setattr(worker, "_BATCH", batch)
    wanted = random_state(rng)
    write_bits(SHAPES, wanted.__getitem__, tmp_path / WEIGHTS)
    staged = weights.stage_checkpoint(tmp_path)
    assert staged.digest == state_digest(wanted)
    worker.commit(staged.steps, Ranks(1))
    assert_same(model, wanted)


def split_weights(path: Path, tensors: int) -> LiveWeights:
    """4096 live weights in so many tensors; `path` gets a delta of three quarters of them."""
    size = 4096 // tensors
    old = {f"expert {i}": np.arange(size, dtype=np.uint16) for i in range(tensors)}
    step = np.where(np.arange(size) % 4, 0, 1).astype(np.uint16)
    delta(path, old, {name: bits + step for name, bits in old.items()})
    whole = Geometry(0, (size,), (1,))
    pieces = {name: (Piece(torch.arange(size, dtype=torch.int16), whole, whole),) for name in old}
    routes = {name: Route((size,), each) for name, each in pieces.items()}
    fallback = Fallback(torch.nn.Module(), {})
    return LiveWeights(routes, dict.fromkeys(routes, (0,)), fallback, Ranks(1))


def calls_of_a_sync(path: Path, tensors: int) -> int:
    """How many Python functions a sync calls."""
    weights = split_weights(path, tensors)
    known = weights.digest()
    called = []
    worker.commit(weights.stage([path], known).steps, Ranks(1))  # compiles
    known = weights.digest()
    sys.setprofile(lambda frame, event, argument: called.append(frame) if event == "call" else None)
    try:
        worker.commit(weights.stage([path], known).steps, Ranks(1))
    finally:
        sys.setprofile(None)
    return len(called)


@pytest.mark.parametrize("memory", [memory_module.HostMemory], indirect=True)
def test_a_sync_takes_no_step_in_python_for_each_tensor(tmp_path, monkeypatch, memory):
    """A mixture of experts has 20,000 of them."""
    monkeypatch.setattr("delta_weight_sync.util.THREADS", 1)
    assert calls_of_a_sync(tmp_path / "many", 512) < calls_of_a_sync(tmp_path / "few", 8) + 64


@pytest.mark.parametrize("memory", [memory_module.HostMemory], indirect=True)
def test_a_commit_of_few_changes_starts_no_threads(tmp_path, monkeypatch, memory):
    monkeypatch.setattr("delta_weight_sync.util.THREADS", 3)
    weights = split_weights(tmp_path / "delta", 512)
    staged = weights.stage([tmp_path / "delta"], weights.digest())
    monkeypatch.setattr("delta_weight_sync.util.ThreadPoolExecutor", None)
    worker.commit(staged.steps, Ranks(1))
