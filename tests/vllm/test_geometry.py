"""Any views of any tensors, on any number of ranks: located, read back, and counted once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync import codec
from delta_weight_sync.digest import live_digest
from delta_weight_sync.vllm import routes
from delta_weight_sync.vllm.memory import HostMemory, Table, collect, of_patch
from delta_weight_sync.vllm.routes import Geometry, part_of
from tests.gpu.interpreted import interpreted

DeviceMemory = interpreted("delta_weight_sync.vllm.gpu").DeviceMemory
MEMORIES = [HostMemory, pytest.param(DeviceMemory, marks=pytest.mark.full)]  # interpreted: it takes its time


@st.composite
def shapes(draw, least=1):
    return tuple(draw(st.lists(st.integers(least, 6), min_size=1, max_size=4)))


@st.composite
def views(draw, shape):
    """A few slicings and turns of a tensor of this shape, as a list of functions."""
    steps, probe = [], torch.empty(shape, device="meta")
    for kind in draw(st.lists(st.sampled_from(["narrow", "turn", "every", "select"]), max_size=4)):
        dim = draw(st.integers(0, probe.ndim - 1))
        size = probe.shape[dim]
        if kind == "narrow":
            first = draw(st.integers(0, size - 1))
            length = draw(st.integers(1, size - first))
            step = lambda t, d=dim, f=first, n=length: t.narrow(d, f, n)  # noqa: E731
        elif kind == "turn":
            other = draw(st.integers(0, probe.ndim - 1))
            step = lambda t, d=dim, o=other: t.transpose(d, o)  # noqa: E731
        elif kind == "every":
            stride = draw(st.integers(1, 3))
            step = lambda t, d=dim, s=stride: t[(slice(None),) * d + (slice(None, None, s),)]  # noqa: E731
        elif probe.ndim > 1:
            at = draw(st.integers(0, size - 1))
            step = lambda t, d=dim, a=at: t.select(d, a)  # noqa: E731
        else:
            continue
        steps.append(step)
        probe = step(probe)
    return steps


def viewed(tensor: torch.Tensor, steps) -> torch.Tensor:
    for step in steps:
        tensor = step(tensor)
    return tensor


class Copying(torch.nn.Module):
    """One parameter, and a loader that copies a view of the tensor into a view of it."""

    def __init__(self, shape, order, source_view, dtype=torch.bfloat16) -> None:
        super().__init__()
        padded = tuple(size + 2 for size in shape)
        memory = torch.zeros([padded[i] for i in order], dtype=dtype)
        self.parameter = torch.nn.Parameter(memory, requires_grad=False)
        self.shape, self.order, self.source_view = shape, order, source_view

    def place(self, memory: torch.Tensor) -> torch.Tensor:
        turned = memory.permute([self.order.index(i) for i in range(len(self.order))])
        return turned[tuple(slice(1, 1 + size) for size in self.shape)]

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.place(self.parameter.data).copy_(viewed(tensor, self.source_view))


@pytest.mark.parametrize("memory", MEMORIES)
@given(data=st.data())
def test_any_view_is_located_and_read_back(memory, data):
    shape = data.draw(shapes())
    steps = data.draw(views(shape))
    part = viewed(torch.arange(np.prod(shape)).view(shape), steps)
    order = data.draw(st.permutations(range(part.ndim)))
    model = Copying(tuple(part.shape), order, steps)
    learned = routes.learn(model, {"w": shape})
    (piece,) = learned.routes["w"].pieces

    # Where each position number really goes, and at which place of the parameter that is.
    numbers = torch.full(model.parameter.shape, -1)
    model.place(numbers).copy_(part)
    places = {int(number): place for place, number in enumerate(numbers.reshape(-1)) if number >= 0}

    chosen = data.draw(st.sets(st.integers(0, int(np.prod(shape)) - 1)))
    table = Table(learned.routes, {"w": (0,)})
    index = np.array(sorted(chosen), np.int64)
    patch = codec.Patch("w", shape, index, (index + 1).astype(np.uint16))
    write, _ = memory(table).prepare(collect(of_patch(patch, table), table))
    assert write.do()[0] == 0
    written = model.parameter.data.view(torch.int16).reshape(-1).tolist()
    assert {place: n for place, n in enumerate(written) if n} == {
        places[number]: number + 1 for number in chosen if number in places
    }

    model.place(model.parameter.data).view(torch.int16).fill_(7)
    route = routes.Route("w", shape, (piece,))
    expected = torch.zeros(int(np.prod(shape)), dtype=torch.int16)
    expected[torch.tensor(sorted(places))] = 7
    assert torch.equal(route.read([0]), expected)


class Rank(torch.nn.Module):
    """Holds some boxes of a tensor, each in a parameter of its own."""

    def __init__(self, boxes) -> None:
        super().__init__()
        self.boxes = boxes
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros([n for _, n in box], dtype=torch.bfloat16)) for box in boxes
        )

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            for part, box in zip(self.parts, self.boxes, strict=True):
                part.copy_(tensor[tuple(slice(first, first + size) for first, size in box)])


@st.composite
def cuts(draw, box):
    """The box, or cut in two and each half again."""
    dim = draw(st.integers(0, len(box) - 1))
    first, size = box[dim]
    if size < 2 or not draw(st.booleans()):
        return [box]
    at = draw(st.integers(1, size - 1))
    halves = [(*box[:dim], half, *box[dim + 1 :]) for half in ((first, at), (first + at, size - at))]
    return [part for half in halves for part in draw(cuts(half))]


@pytest.mark.parametrize("memory", MEMORIES)
@given(data=st.data())
def test_however_ranks_share_a_tensor_its_digest_is_the_tensors(memory, data):
    shape = data.draw(shapes())
    boxes = data.draw(cuts(tuple((0, size) for size in shape)))
    ranks = [Rank([]) for _ in range(data.draw(st.integers(1, 3)))]
    for box in boxes:  # every box somewhere, some in several places
        for rank in data.draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=4)):
            rank.__init__([*rank.boxes, box])
    tensor = torch.randn(shape).to(torch.bfloat16)
    learned = []
    for rank in ranks:
        rank.load_weights([("w", tensor)])
        learned.append(routes.learn(rank, {"w": shape}))

    owned, unroutable = routes.ownership({"w": shape}, [one.sources for one in learned])
    assert not unroutable
    parts = [one.routes["w"].read(mine["w"]) for one, mine in zip(learned, owned, strict=True)]
    assert torch.equal(sum(parts), tensor.reshape(-1).view(torch.int16))
    tables = [Table(one.routes, mine) for one, mine in zip(learned, owned, strict=True)]
    whole = live_digest("w", tensor.reshape(-1).view(torch.int16))
    assert sum(memory(table).digest() for table in tables) % 2**64 == whole


@pytest.mark.parametrize(
    "boxes",
    [[((0, 4), (0, 6))], [((0, 5), (0, 6)), ((4, 4), (0, 6))], [((0, 8), (0, 4)), ((0, 8), (2, 4))]],
    ids=["incomplete", "overlapping rows", "overlapping columns"],
)
def test_parts_that_are_not_the_tensor_are_refused_by_name(boxes):
    sources = [routes.learn(Rank([box]), {"w": (8, 6)}).sources for box in boxes]
    with pytest.raises(routes.RouteError, match="w: its parts in the model overlap, or are not all of it"):
        routes.ownership({"w": (8, 6)}, sources)


@pytest.mark.parametrize("offsets", [(0, 0, 16), (0, 12, 16)])
def test_overlap_that_makes_up_for_what_is_missing_is_seen(offsets):
    """Three runs of eight have as many elements as the tensor, but not once each."""
    parts = tuple(Geometry(offset, (8,), (1,)) for offset in offsets)
    with pytest.raises(routes.RouteError):
        routes.ownership({"w": (4, 6)}, [{"w": parts}])


def test_what_only_some_ranks_can_route_none_does():
    shapes = {"w": (8, 6), "x": (8, 6)}
    whole = (part_of(torch.empty(8, 6)),)
    owned, unroutable = routes.ownership(shapes, [{"w": whole, "x": whole}, {"w": whole, "x": "it is cast"}])
    assert unroutable == {"x": "it is cast"}
    assert owned == [{"w": (0,)}, {"w": ()}]


def test_what_another_rank_holds_is_no_loss():
    """Expert parallelism: one rank has the expert, the other drops it."""
    shapes, whole = {"w": (8, 6)}, (part_of(torch.empty(8, 6)),)
    assert routes.ownership(shapes, [{"w": ()}, {"w": whole}]) == ([{"w": ()}, {"w": (0,)}], {})
    assert routes.Route("w", (8, 6), ()).read(()).eq(0).all()
