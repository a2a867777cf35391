"""Routes are learned from whatever copies a loader makes, and refused where writing would not be loading."""

import pytest
import torch

from delta_weight_sync import codec
from delta_weight_sync.vllm import routes
from delta_weight_sync.vllm.memory import HostMemory, Table, collect, of_patch
from tests.vllm.loaders import SHAPES, Model, Reached, learn


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
    table = Table({route.name: route}, {route.name: ()})
    patch = codec.Patch(route.name, route.shape, index.numpy(), ulps.numpy().view("uint16"))
    step, _ = HostMemory(table).prepare(collect(of_patch(patch, table), table))
    assert step.do() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_writing_through_a_route_is_loading(name, dtype):
    """In float32 parameters, too: a bf16 number is the upper half of the same number there."""
    model = Model(dtype)
    tensor = torch.randn(SHAPES[name]).to(torch.bfloat16)
    model.load_weights([(name, tensor)])
    before = {key: value.clone() for key, value in model.state_dict().items()}

    learned = learn(model, name)
    assert not learned.unroutable
    for key, value in model.state_dict().items():
        assert torch.equal(bits(value), bits(before[key])), "learning writes nothing"
    owned, _ = routes.ownership({name: SHAPES[name]}, [learned.sources()])
    route = learned.routes[name]
    assert torch.equal(route.read(owned[0][name]), bits(tensor)), "a route reads what was loaded"

    index, ulps, new = patched(tensor, seed=len(name))
    write(route, index, ulps)
    assert torch.equal(route.read(owned[0][name]), bits(new))
    written = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_weights([(name, new)])
    for key, value in model.state_dict().items():
        assert torch.equal(bits(value), bits(written[key]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dropped", "drops it"),
        ("scaled", "computes with it (aten.mul.Tensor)"),
        ("scaled_in_place", "computes with it (aten.mul_.Tensor)"),
        ("exponentiated", "computes with it (aten.exp.default)"),
        ("reordered", "computes with it (aten._unsafe_view.default)"),
        ("concatenated", "computes with it (aten.cat.default)"),
        ("through_a_buffer", "computes with it (aten.copy_.default)"),
        ("added", "computes with it (aten.add_.Tensor)"),
        ("put_by_index", "computes with it (aten.index_put_.default)"),
        ("filled", "reads its values"),
        ("doubled_afterwards", "writes to the same place again"),
        ("twice_to_one_place", "writes to the same place again"),
        ("failing", "fails on a probe (AssertionError: an odd shape)"),
    ],
)
def test_what_is_no_copy_has_a_reason_and_does_not_disturb_the_others(name, why):
    model = Model()
    shapes = {name: (4, 6) if name == "concatenated" else (1,) if name == "filled" else (8, 6), "scalar": ()}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learned = routes.learn(Reached(model), shapes)
    owned, unroutable = routes.ownership(shapes, [learned.sources()])
    assert unroutable == {name: f"vLLM's loader {why}"}
    assert set(owned[0]) == {"scalar"}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_that_are_joined_are_refused_together():
    """One of them is copied as well, which is not all that a change of it has to reach."""
    learned = learn(Model(), "upper", "lower")
    assert learned.unroutable == dict.fromkeys(
        ["upper", "lower"], "vLLM's loader computes with it (aten.cat.default)"
    )


def test_half_precision_cannot_hold_the_bits():
    learned = learn(Model(torch.float16), "plain")
    assert learned.unroutable == {"plain": "vLLM's loader casts it to torch.float16"}


@pytest.mark.parametrize("name", ["exchanged", "replaced"])
def test_a_loader_that_exchanges_parameters_is_refused_and_they_are_put_back(name):
    model = Model()
    before, parameter = model.wide.data.clone(), model.wide
    with pytest.raises(routes.RouteError, match="wide: vLLM's loader replaces this parameter"):
        learn(model, name)
    assert model.wide is parameter
    assert torch.equal(model.wide.data, before)


def test_two_tensors_in_one_place_are_refused():
    with pytest.raises(routes.RouteError, match=r"plain\.1 and plain\.2 are one parameter"):
        routes.learn(Reached(Model()), {"plain.1": (8, 6), "plain.2": (8, 6)})


def test_a_parameter_made_from_others_is_refused():
    """Deltas would never reach it: vLLM made it after loading, from what they change."""
    with pytest.raises(routes.RouteError, match="experts: vLLM made it from other parameters"):
        routes.learn(Model(), {"plain": (8, 6), "twice": (6,)})


def test_so_is_one_that_the_loader_itself_makes_from_others():
    with pytest.raises(routes.RouteError, match="experts: vLLM made it from other parameters"):
        routes.learn(Model(), {"plain": (8, 6), "twice": (6,), "derived": (8, 6)})


def test_a_loader_that_fails_before_it_touches_anything_excuses_nothing():
    """One odd tensor must not switch the check off for all parameters."""
    with pytest.raises(routes.RouteError, match="experts: vLLM made it from other parameters"):
        routes.learn(Model(), {"plain": (8, 6), "twice": (6,), "failing": (8, 6)})


def test_what_a_failing_loader_had_in_hand_is_loaded_anew_with_it():
    learned = routes.learn(Model(), {"plain": (8, 6), "twice": (6,), "failing_halfway": (8, 6)})
    reason = "vLLM's loader fails on a probe (AssertionError: what comes next needs values)"
    assert learned.unroutable == {"failing_halfway": reason}


def test_all_tensors_are_loaded_in_one_go():
    """18 000 experts one by one would take minutes."""
    model = Model()
    learn(model, "plain", "scalar")
    assert model.seen == ["plain", "scalar"]


def test_copying_works_again_after_learning():
    learn(Model(), "failing")
    assert torch.zeros(2).copy_(torch.ones(2)).sum() == 2
