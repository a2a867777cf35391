"""Routes are learned from whatever copies a loader makes, and refused where writing would not be loading."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync import codec
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.vllm import routes
from delta_weight_sync.vllm.gpu import DeviceMemory
from delta_weight_sync.vllm.memory import HostMemory, Table, find
from delta_weight_sync.vllm.routes import Geometry, part_of

Load = Callable[["Model", torch.Tensor], object]


def merged(model: "Model", tensor: torch.Tensor) -> None:
    for first, part in zip((0, 4, 6), tensor.split([4, 2, 2]), strict=True):
        model.wide.data.narrow(0, first, part.shape[0]).copy_(part)


def stacked(model: "Model", tensor: torch.Tensor) -> None:
    for expert, part in enumerate(tensor.chunk(3)):
        model.experts.data[expert].narrow(0, 0, 4).copy_(part)


def through_a_buffer(model: "Model", tensor: torch.Tensor) -> None:
    buffer = torch.zeros(8, 6, dtype=torch.bfloat16)
    buffer[:] = tensor
    model.wide.data.copy_(buffer)


def failing(model: "Model", tensor: torch.Tensor) -> None:
    raise AssertionError("an odd shape")


def failing_halfway(model: "Model", tensor: torch.Tensor) -> None:
    model.experts.data.copy_(tensor.expand(3, 8, 6))
    raise AssertionError("what comes next needs values")


def exchanged(model: "Model", tensor: torch.Tensor) -> None:
    model.wide.data = model.wide.data.clone()


def replaced(model: "Model", tensor: torch.Tensor) -> None:
    model.wide = torch.nn.Parameter(tensor, requires_grad=False)


# Name of a tensor -> its shape, and what the loader does with it.
COPIES: dict[str, tuple[tuple[int, ...], Load]] = {
    "plain": ((8, 6), lambda model, t: model.wide.data.copy_(t)),
    "rows": ((4, 6), lambda model, t: model.wide.data.narrow(0, 2, 4).copy_(t)),
    "columns": ((8, 2), lambda model, t: model.wide.data[:, 1:3].copy_(t)),
    "transposed": ((6, 8), lambda model, t: model.wide.data.copy_(t.t())),
    "transposed_copy": ((6, 8), lambda model, t: model.wide.data.copy_(t.to("cpu").t().contiguous())),
    "merged": ((8, 6), merged),
    "stacked": ((12, 6), stacked),
    "stacked_transposed": ((3, 6, 8), lambda model, t: model.experts.data.copy_(t.permute(0, 2, 1))),
    "padded": ((5, 6), lambda model, t: (model.wide.data[:5].copy_(t), model.wide.data[5:].fill_(0))),
    "padded_within_rows": (
        (8, 4),
        lambda model, t: (model.wide.data[:, :4].copy_(t), model.wide.data[:, 4:].zero_()),
    ),
    "cleared_first": ((5, 6), lambda model, t: (model.wide.data.zero_(), model.wide.data[:5].copy_(t))),
    "twice": ((6,), lambda model, t: (model.long.data[:6].copy_(t), model.long.data[6:].copy_(t))),
    "repeated": ((6,), lambda model, t: model.wide.data.copy_(t)),
    "scalar": ((), lambda model, t: model.long.data[3].copy_(t)),
}
# The same for those that have no route, and why.
OTHERS: dict[str, tuple[tuple[int, ...], Load, str]] = {
    "dropped": ((8, 6), lambda model, t: None, "drops it"),
    "scaled_in_place": (
        (8, 6),
        lambda model, t: model.wide.data.copy_(t.clone().mul_(2)),
        "computes with it (aten.mul_.Tensor)",
    ),
    "exponentiated": (
        (8, 6),
        lambda model, t: model.wide.data.copy_(t.float().exp()),
        "computes with it (aten.exp.default)",
    ),
    "reordered": (
        (8, 6),
        lambda model, t: model.wide.data.copy_(t.view(2, 4, 6).transpose(0, 1).reshape(8, 6)),
        "computes with it (aten._unsafe_view.default)",
    ),
    "through_a_buffer": ((8, 6), through_a_buffer, "computes with it (aten.copy_.default)"),
    "added": ((8, 6), lambda model, t: model.wide.data.add_(t), "computes with it (aten.add_.Tensor)"),
    "filled": ((1,), lambda model, t: model.long.data.fill_(t.item()), "reads its values"),
    "doubled_afterwards": (
        (8, 6),
        lambda model, t: (model.wide.data.copy_(t), model.wide.data[7].mul_(2)),
        "writes to its place again",
    ),
    "twice_to_one_place": (
        (8, 6),
        lambda model, t: (model.wide.data.copy_(t), model.wide.data.copy_(t)),
        "writes to its place again",
    ),
    "failing": ((8, 6), failing, "fails on a probe (AssertionError: an odd shape)"),
}
LOADS: dict[str, Load] = {name: load for name, (_, load, *_) in (COPIES | OTHERS).items()} | {
    "failing_halfway": failing_halfway,
    "exchanged": exchanged,
    "replaced": replaced,
    "derived": lambda model, t: model.experts.data.copy_(model.wide.data.expand(3, 8, 6) / 2),
}


class Model(torch.nn.Module):
    """A loader that does with a tensor what `LOADS` says; "upper" and "lower" wait for each other."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(8, 6).to(dtype), requires_grad=False)
        self.long = torch.nn.Parameter(torch.randn(12).to(dtype), requires_grad=False)
        self.experts = torch.nn.Parameter(torch.randn(3, 8, 6).to(dtype), requires_grad=False)
        self.seen: list[str] = []

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        waiting = {}
        for name, tensor in weights:
            self.seen.append(name)
            if name in ("upper", "lower"):
                waiting[name] = tensor
            else:
                LOADS[name.partition(".")[0]](self, tensor)
        if len(waiting) == 2:
            self.wide.data.copy_(torch.cat([waiting["upper"], waiting["lower"]]))
            self.long.data.narrow(0, 0, 6).copy_(waiting["lower"][0])
        for parameter in self.parameters():  # as vLLM's checks do, it reads
            parameter.sum().item()


class Reached(torch.nn.Module):
    """The model with a loader that also touches every parameter, as loading all of a checkpoint does."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def load_weights(self, weights) -> None:
        for parameter in self.model.parameters():
            parameter.data.zero_()
        self.model.load_weights(weights)


def learn(model: Model, **shapes: tuple[int, ...]) -> routes.Learned:
    """The routes of these tensors, as if the others were loaded, too."""
    return routes.learn(Reached(model), shapes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.int16)


def patched(tensor: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every second or so element with other bits: (positions, ulps, the tensor then)."""
    generator = torch.Generator().manual_seed(seed)
    flat = bits(tensor)
    index = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 2 + 1].sort().values
    other = torch.randint(-32768, 32768, (index.numel(),), generator=generator).to(torch.int16)
    new = flat.clone()
    new[index] = other
    return index, other - flat[index], new.view(torch.bfloat16).view(tensor.shape)


def write(route: routes.Route, index: torch.Tensor, ulps: torch.Tensor) -> None:
    table = Table({"w": route}, {"w": ()})
    patch = codec.Patch("w", route.shape, index.numpy(), ulps.numpy().view("uint16"))
    step, _ = HostMemory(table).prepare(find([codec.Decoded.of([patch])], [table])[0])
    assert step.do()[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", COPIES)
def test_writing_through_a_route_is_loading(name, dtype):
    """In float32 parameters, too: a bf16 number is the upper half of the same number there."""
    model = Model(dtype)
    shape, _ = COPIES[name]
    tensor = torch.randn(shape).to(torch.bfloat16)
    model.load_weights([(name, tensor)])
    before = {key: value.clone() for key, value in model.state_dict().items()}

    learned = learn(model, **{name: shape})
    assert set(learned.routes) == {name}
    for key, value in model.state_dict().items():
        assert torch.equal(bits(value), bits(before[key])), "learning writes nothing"
    owned, _ = routes.ownership({name: shape}, [learned.sources])
    route = learned.routes[name]
    assert torch.equal(route.read(owned[0][name]), bits(tensor)), "a route reads what was loaded"

    index, ulps, new = patched(tensor, seed=len(name))
    write(route, index, ulps)
    assert torch.equal(route.read(owned[0][name]), bits(new))
    written = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_weights([(name, new)])
    for key, value in model.state_dict().items():
        assert torch.equal(bits(value), bits(written[key]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_copy_has_a_reason_and_does_not_disturb_the_others(name):
    model = Model()
    shape, _, why = OTHERS[name]
    shapes = {name: shape, "scalar": ()}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learned = learn(model, **shapes)
    assert torch.zeros(2).copy_(torch.ones(2)).sum() == 2, "copying works again after learning"
    owned, unroutable = routes.ownership(shapes, [learned.sources])
    assert unroutable == {name: f"vLLM's loader {why}"}
    assert set(owned[0]) == {"scalar"}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_that_are_joined_are_refused_together():
    """One of them is copied as well, which is not all that a change of it has to reach."""
    learned = learn(Model(), upper=(4, 6), lower=(4, 6))
    assert learned.sources == dict.fromkeys(
        ["upper", "lower"], "vLLM's loader computes with it (aten.cat.default)"
    )


def test_half_precision_cannot_hold_the_bits():
    learned = learn(Model(torch.float16), plain=(8, 6))
    assert learned.sources == {"plain": "vLLM's loader casts it from torch.bfloat16 to torch.float16"}


@pytest.mark.parametrize("name", ["exchanged", "replaced"])
def test_a_loader_that_exchanges_parameters_is_refused_and_they_are_put_back(name):
    model = Model()
    before = model.wide.data.clone()
    parameter = model.wide
    with pytest.raises(routes.RouteError, match="wide: vLLM's loader replaces this parameter"):
        learn(model, **{name: (8, 6)})
    assert model.wide is parameter
    assert torch.equal(model.wide.data, before)


def test_two_tensors_in_one_place_are_refused():
    with pytest.raises(routes.RouteError, match=r"plain\.1 and plain\.2 are one parameter"):
        learn(Model(), **{"plain.1": (8, 6), "plain.2": (8, 6)})


def test_parameters_on_two_devices_are_refused_with_the_option_that_moves_them():
    known = learn(Model(), plain=(8, 6), stacked=(12, 6)).routes
    far = [piece._replace(memory=piece.memory.to("meta")) for piece in known["stacked"].pieces]
    known["stacked"] = known["stacked"]._replace(pieces=tuple(far))
    with pytest.raises(routes.RouteError, match="without --cpu-offload-gb"):
        Table(known, {"plain": (0,), "stacked": (0,)})


@pytest.mark.parametrize("other", [{}, {"derived": (8, 6)}, {"failing": (8, 6)}], ids=str)
def test_a_parameter_made_from_others_is_refused(other):
    """By vLLM after loading, or by its loader. One odd tensor does not switch the check off for all."""
    with pytest.raises(routes.RouteError, match="experts: no weight of the run fills this parameter"):
        routes.learn(Model(), {"plain": (8, 6), "twice": (6,), **other})


def test_what_a_failing_loader_had_in_hand_is_loaded_anew_with_it():
    learned = routes.learn(Model(), {"plain": (8, 6), "twice": (6,), "failing_halfway": (8, 6)})
    reason = "vLLM's loader fails on a probe (AssertionError: what comes next needs values)"
    assert {name for name in learned.sources if name not in learned.routes} == {"failing_halfway"}
    assert learned.sources["failing_halfway"] == reason


def test_all_tensors_are_loaded_in_one_go():
    """18 000 experts one by one would take minutes."""
    model = Model()
    learn(model, plain=(8, 6), scalar=())
    assert model.seen == ["plain", "scalar"]


MEMORIES = [HostMemory, DeviceMemory]


@st.composite
def shapes(draw, least=1):
    return tuple(draw(st.lists(st.integers(least, 6), min_size=1, max_size=4)))


@st.composite
def views(draw, shape):
    """A few slicings and turns of a tensor of this shape, as a list of functions."""
    steps = []
    probe = torch.empty(shape, device="meta")
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
        self.shape = shape
        self.order = order
        self.source_view = source_view

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
    write, _ = memory(table).prepare(find([codec.Decoded.of([patch])], [table])[0])
    assert write.do()[0] == 0
    written = model.parameter.data.view(torch.int16).reshape(-1).tolist()
    assert {place: n for place, n in enumerate(written) if n} == {
        places[number]: number + 1 for number in chosen if number in places
    }

    model.place(model.parameter.data).view(torch.int16).fill_(7)
    route = routes.Route(shape, (piece,))
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


@pytest.mark.full
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
    whole = tensor_digest("w", bits(tensor).numpy().view("uint16"))
    assert sum(memory(table).digest() for table in tables) % 2**64 == whole


@pytest.mark.parametrize(
    "boxes",
    [[((0, 4), (0, 6))], [((0, 5), (0, 6)), ((4, 4), (0, 6))], [((0, 8), (0, 4)), ((0, 8), (2, 4))]],
    ids=["incomplete", "overlapping rows", "overlapping columns"],
)
def test_parts_that_are_not_the_tensor_are_refused_by_name(boxes):
    sources = [routes.learn(Rank([box]), {"w": (8, 6)}).sources for box in boxes]
    with pytest.raises(routes.RouteError, match="w: its parts in vLLM overlap, or do not cover all of it"):
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
    shapes = {"w": (8, 6)}
    whole = (part_of(torch.empty(8, 6)),)
    assert routes.ownership(shapes, [{"w": ()}, {"w": whole}]) == ([{"w": ()}, {"w": (0,)}], {})
    assert routes.Route((8, 6), ()).read(()).eq(0).all()
