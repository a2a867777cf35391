"""The trainer's diff by kernels: exact for every pattern, dtype and layout, and as cheap for many tensors."""

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from delta_weight_sync import codec, digest
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.errors import CodecError
from delta_weight_sync.gpu import used
from delta_weight_sync.publish.mirror import Block, Found, Mirror, Part
from tests.gpu.interpreted import Operations, interpreted, kernels
from tests.support.mirrors import find, whole_parts

publish_gpu = interpreted("delta_weight_sync.publish._gpu")
__all__ = ["kernels"]
pytestmark = pytest.mark.usefixtures("kernels")
PLACES = pytest.mark.parametrize("place", ["host", "device"])
State = dict[str, torch.Tensor]


def diff(mirror: Mirror, state: State) -> Found:
    return find(mirror, whole_parts(state.items()))


def started(place: str, state: State, *, finite: bool = False) -> Mirror:
    mirror = Mirror(place, finite=finite)
    for name, tensor in state.items():
        mirror.add(name, tensor)
    return mirror


def holds(mirror: Mirror, state: State) -> None:
    """The mirror has the bits of `state`, and their digest."""
    now = {name: to_bits(tensor) for name, tensor in state.items()}
    for name, expected in now.items():
        np.testing.assert_array_equal(mirror.bits(name), expected)
    assert mirror.digest % 2**64 == digest.state_digest(now)


def check(place: str, old: State, new: State) -> None:
    """Found is what differs between torch's own casts, and the mirror and its digest follow."""
    mirror = started(place, old)
    found = diff(mirror, new)
    mirror.keep(found)
    for patch, name in zip(found.patches, new, strict=True):
        expected = codec.diff(name, to_bits(old[name]), to_bits(new[name]))
        assert (patch.name, patch.shape) == (name, expected.shape)
        np.testing.assert_array_equal(patch.index, expected.index)
        np.testing.assert_array_equal(patch.ulps, expected.ulps)
    holds(mirror, new)


def bits(values: np.ndarray) -> torch.Tensor:
    """The bf16 numbers of these patterns."""
    return torch.from_numpy(values.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def test_every_bf16_pattern_as_old_and_as_new():
    every = np.arange(65536)
    check("host", {"w": bits(every)}, {"w": bits(every * 25173 + 1)})
    check("device", {"w": bits(every)}, {"w": bits(np.where(every % 3, every, 65535 - every))})


def test_float32_is_rounded_as_torch_rounds_it():
    """Every upper half with lower halves around the tie: infinities, NaNs and subnormals among them."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    upper = np.arange(0, 65536, 7, dtype=np.uint32) << 16
    odd = [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0x7F7FFFFF, 1, 0x80000001]
    values = np.concatenate([(upper[:, None] | lower).ravel(), np.uint32(odd)])
    new = torch.from_numpy(values.view(np.float32))
    check("host", {"w": new.roll(1)}, {"w": new})


def test_every_float16():
    every = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.float16))
    check("device", {"w": every.flip(0)}, {"w": every})


def sizes() -> tuple[State, State]:
    """Tensors of odd sizes and all dtypes, some at odd addresses; a third of their elements differs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (0,), (3, 0), (4095,), (4096,), (2, 4097), (64, 129), (9001,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    old, new = {}, {}
    for number, (shape, dtype) in enumerate(itertools.product(shapes, dtypes)):
        numel = int(np.prod(shape))
        values = torch.randn(numel + 1, generator=generator).to(dtype)
        later = torch.where(torch.rand(numel + 1, generator=generator) < 0.3, values * 1.1, values)
        first = number % 2  # the second of two lies at an odd address
        old[f"w{number}"] = values[first : first + numel].view(shape)
        new[f"w{number}"] = later[first : first + numel].view(shape)
    return old, new


@PLACES
def test_any_size_dtype_and_address(place):
    check(place, *sizes())


@PLACES
@pytest.mark.parametrize("change", [lambda t: t.clone(), lambda t: -t], ids=["nothing", "everything"])
def test_nothing_and_everything(place, change):
    """Where everything changed the room for changes has to grow; at the next diff it is there."""
    old = {"a": torch.ones(5000), "b": torch.ones(100, dtype=torch.bfloat16)}
    check(place, old, {name: change(tensor) for name, tensor in old.items()})


@PLACES
def test_a_step_after_another_with_parameters_that_move_in_memory(place):
    state = {"a": torch.randn(5000), "b": torch.randn(70)}
    mirror = started(place, state)
    for step in range(3):
        state["a"][step::7] *= 1.5  # in place
        state["b"] = state["b"] * 1.5
        mirror.keep(diff(mirror, state))
    holds(mirror, state)


def test_positions_beyond_31_bits():
    """The end of a parameter of 2^33 elements, of which nothing else is in memory."""
    numel, there = 1 << 33, 5000
    old, new = torch.ones(there), torch.ones(there)
    new[[0, 10, there - 1]] = 2
    bits = torch.from_numpy(to_bits(old).view(np.int16))
    mirror = SimpleNamespace(data_ptr=lambda: bits.data_ptr() - 2 * (numel - there))
    part = Part("w", new, Block((numel,), (numel - there,), (there,)), True)
    device = publish_gpu.DeviceDiff(torch.device("cpu"))
    found = device.find([part], {"w": mirror})
    index = numel - there + np.array([0, 10, there - 1])
    np.testing.assert_array_equal(found.patches[0].index, index)
    was, now = (to_bits(tensor)[index - index[0]] for tensor in (old, new))
    assert (found.moved - digest.change_digest("w", index, was, now)) % 2**64 == 0
    device.keep(found)
    np.testing.assert_array_equal(bits.numpy().view(np.uint16), to_bits(new))


def test_tensors_that_are_made_for_a_hand_over_are_let_go(monkeypatch):
    """Gathered from other ranks, say: the whole model would not fit next to the parameters."""
    state = {f"w{i}": torch.randn(1000) for i in range(30)}
    mirror, alive, most = started("device", state), weakref.WeakSet(), []

    def gathered():
        for name, tensor in state.items():
            made = tensor * 2
            alive.add(made)
            most.append(len(alive))
            yield Part(name, made, Block.whole(made.shape), False)

    monkeypatch.setattr("delta_weight_sync.publish.mirror._HELD", 5 * 4000)
    monkeypatch.setattr(codec, "compare", None)  # without tensors on the host, the host compares nothing
    found = find(mirror, gathered())
    mirror.keep(found)
    assert max(most) <= 8
    assert [patch.name for patch in found.patches] == list(state)
    holds(mirror, {name: tensor * 2 for name, tensor in state.items()})


@PLACES
def test_what_other_ranks_found_is_added(place):
    """On a GPU by a kernel, on the host by a loop: to the same bits and the same digest."""
    state = {"a": torch.randn(5000), "b": torch.randn(70)}
    theirs = [codec.diff(name, to_bits(t), to_bits(t * 1.01)) for name, t in state.items()]
    mirror = started(place, state)
    mirror.take(theirs)
    memory = {name: torch.from_numpy(to_bits(t).view(np.int16)) for name, t in state.items()}
    before = digest.state_digest({name: to_bits(t) for name, t in state.items()})
    moved = publish_gpu.DeviceDiff(torch.device("cpu")).take(theirs, memory)
    for name, kept in memory.items():
        np.testing.assert_array_equal(kept.numpy().view(np.uint16), mirror.bits(name))
    assert (mirror.digest - before - moved) % 2**64 == 0


@PLACES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_change_to_nan_or_infinity_is_refused_and_changes_nothing(place, value):
    state = {"a": torch.randn(5000), "b": torch.randn(70)}
    mirror = started(place, state, finite=True)
    with pytest.raises(CodecError, match="b has weights that are NaN or infinite"):
        diff(mirror, state | {"b": state["b"].index_fill(0, torch.tensor(7), value)})
    assert not any(patch.index.size for patch in diff(mirror, state).patches)


def cost(place: str, tensors: int) -> tuple[int, int, int]:
    """Launches, waits and operations of a diff of a model of 20,000 elements."""
    state = {f"w{i}": torch.randn(20_000 // tensors) for i in range(tensors)}
    mirror = started(place, state, finite=True)
    if place == "host":
        diff(mirror, state)  # moves the mirror into pinned memory, which is done once
    for tensor in list(state.values())[::10]:
        tensor[::50] *= 1.5
    used.clear()
    with Operations() as operations:
        mirror.keep(diff(mirror, state))
    return used["launches"], used["waits"], operations.count


@pytest.mark.parametrize(
    ("place", "many"), [("host", 200), pytest.param("device", 500, marks=pytest.mark.full)]
)
def test_many_tensors_cost_as_few_launches_as_a_few(place, many):
    """Nor does torch launch or wait more often; what is left per tensor is Python's."""
    cost(place, 10)  # the first one in a process also makes the factors of the digest
    few = cost(place, 10)
    assert few == cost(place, many)
    launches, waits, operations = few
    assert launches <= 4
    assert waits <= 3
    assert operations <= 20
