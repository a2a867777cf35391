"""The diff on a device: exact for every pattern, dtype and layout, at equal cost for many tensors."""

import itertools
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

from delta_weight_sync import codec, digest, gpu
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.errors import CodecError
from delta_weight_sync.publish import _gpu
from delta_weight_sync.publish.blocks import Block, Part
from delta_weight_sync.publish.mirror import Found, Mirror
from tests.gpu.on_host import Operations, on_a_device
from tests.support.mirrors import find, whole_parts

__all__ = ["on_a_device"]
pytestmark = pytest.mark.usefixtures("on_a_device")
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
    """Found is what a plain loop finds to differ, and the mirror and its digest follow."""
    mirror = started(place, old)
    found = diff(mirror, new)
    mirror.keep(found)
    patches = {patch.name: patch for patch in found.patches}
    assert [*patches] == [name for name in new if name in patches], "in the order of the parameters"
    for name in new:
        was, now = (to_bits(state[name]).ravel().tolist() for state in (old, new))
        changes = [(i, (now[i] - was[i]) % 65536) for i in range(len(was)) if now[i] != was[i]]
        assert (name in patches) == bool(changes)
        if changes:
            patch = patches[name]
            assert patch.shape == tuple(new[name].shape)
            assert [*zip(patch.index.tolist(), patch.ulps.tolist(), strict=True)] == changes
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


def test_a_nan_that_stays_one_is_no_change():
    """A card casts a NaN to other bits than the host does."""
    odd = torch.tensor([0x7FC12345, 0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    check("device", {"w": odd}, {"w": -odd})


def test_words_of_other_dtypes_keep_all_their_bits():
    """They come as numbers in bf16, of which some look like NaN; beside others, which are cast."""
    values = {"w": torch.randn(3000).view(torch.bfloat16), "v": torch.randn(50)}
    check("device", values, {name: tensor.flip(0) for name, tensor in values.items()})
    mirror = Mirror("device", finite=True)
    mirror.add("w", bits(np.zeros(9)), "F32")
    mirror.keep(diff(mirror, {"w": bits(np.arange(0x7F80, 0x7F89))}))
    np.testing.assert_array_equal(mirror.bits("w"), np.arange(0x7F80, 0x7F89))


def test_every_float16():
    every = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.float16))
    check("device", {"w": every.flip(0)}, {"w": every})


def sizes() -> tuple[State, State]:
    """Tensors of odd sizes and all dtypes, some at odd addresses; a third of their elements differs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (0,), (3, 0), (4095,), (4096,), (2, 4097), (64, 129), (9001,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    old = {}
    new = {}
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


@PLACES
@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_parts_are_cut_into_chunks_of_any_size(monkeypatch, place, chunk):
    monkeypatch.setattr(_gpu, "CHUNK", chunk)
    monkeypatch.setattr("delta_weight_sync.gpu.CHANGES", 7)
    shapes = {"a": (3, 5), "none": (0, 4), "b": (), "c": (61,), "d": (2, 3, 4), "e": (1,)}
    old = {name: torch.randn(shape) for name, shape in shapes.items()}
    check(place, old, {name: -t if t.dim() != 1 else t.where(t > 0, 2 * t) for name, t in old.items()})


def test_digests_of_positions_beyond_31_bits():
    position = torch.tensor([0, 4095, 4096, (1 << 31) - 1, 1 << 31, (1 << 33) + 4097, (1 << 40) + 5])
    seeds = torch.tensor([int(digest.seed("w").astype(np.int64))]).expand(len(position))
    for i, factor in zip(position.numpy(), gpu.factors(seeds, position).tolist(), strict=True):
        one = digest.change_digest("w", np.array([i]), np.zeros(1, np.uint16), np.ones(1, np.uint16))
        assert factor % 2**64 == one


def test_tensors_that_are_made_for_a_hand_over_are_let_go(monkeypatch):
    """Gathered from other ranks, say: the whole model would not fit next to the parameters."""
    state = {f"w{i}": torch.randn(1000) for i in range(30)}
    mirror = started("device", state)
    alive = weakref.WeakSet()
    most = []

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
    """On a GPU and on the host: to the same bits and the same digest."""
    state = {"a": torch.randn(5000), "b": torch.randn(70)}
    theirs = [codec.diff(name, to_bits(t), to_bits(t * 1.01)) for name, t in state.items()]
    mirror = started(place, state)
    mirror.take(theirs)
    memory = {name: torch.from_numpy(to_bits(t).view(np.int16)) for name, t in state.items()}
    before = digest.state_digest({name: to_bits(t) for name, t in state.items()})
    moved = _gpu.DeviceDiff(torch.device("cpu")).take(theirs, memory)
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


def cost(place: str, sizes: list[int]) -> tuple[Counter[str], int]:
    """How often torch runs each operation, and the host waits, in a hand-over."""
    state = {f"w{i}": torch.randn(size) for i, size in enumerate(sizes)}
    mirror = started(place, state, finite=True)
    diff(mirror, state)  # moves the mirrors into one tensor, which is done once
    for tensor in state.values():
        tensor[::50] *= 1.5
    with Operations() as operations:
        found = diff(mirror, state)
        if place == "device":
            mirror.keep(found)  # on the host, a compiled loop does it
    assert sum(patch.index.size for patch in found.patches) == sum(-(-size // 50) for size in sizes)
    return operations.by_name, operations.waits


@pytest.mark.full
@PLACES
def test_many_tensors_cost_as_few_launches_as_a_few(place):
    """Nor does the host wait more often; what is left per tensor is Python's."""
    few, waits = cost(place, [2000] * 10)
    many, its_waits = cost(place, [1] * 20_000)
    assert few == many
    assert waits == its_waits == 2
    assert few.total() < 100
