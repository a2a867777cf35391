"""What vLLM makes of weights and keeps is found wherever it is, and constants are told from it."""

from types import SimpleNamespace

import pytest
import torch

from delta_weight_sync.vllm import routes


class Attention(torch.nn.Module):
    """One parameter and, as in vLLM, a backend that is a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("frequencies", torch.linspace(0, 1, 8))
        self.impl = SimpleNamespace(slopes=torch.linspace(1, 2, 4), sinks=self.weight[0])

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def built() -> torch.nn.Module:
    """A model of one attention layer that was watched while it was built, and is loaded."""
    model = routes.watch_build(lambda: torch.nn.Sequential(Attention()))
    model.load_weights = model[0].load_weights
    model.load_weights([("weight", torch.full((4, 4), 2.0))])
    return model


def finished(model: torch.nn.Module, finish=lambda model: None) -> torch.nn.Module:
    routes.watch_finish(finish, model)
    return model


def stale(model: torch.nn.Module) -> str:
    return routes.stale(model, set())


def test_constants_and_views_of_parameters_hold_back_nothing():
    model = finished(built())
    assert stale(model) == ""
    assert set(routes.learn(model, {"weight": (4, 4)}).routes) == {"weight"}


def test_a_model_with_a_derived_tensor_is_refused_when_its_routes_are_learned():
    model = finished(built())
    model[0].impl.sinks = model[0].weight[0].float()
    with pytest.raises(routes.RouteError, match=r"0\.impl\.sinks: vLLM keeps it outside of the parameters"):
        routes.learn(model, {"weight": (4, 4)})


PLACES = {
    "0.W_UV": lambda layer, tensor: setattr(layer, "W_UV", tensor),
    "0.absorbed": lambda layer, tensor: layer.register_buffer("absorbed", tensor),
    "0.packed.1": lambda layer, tensor: setattr(layer, "packed", [None, tensor]),
    "0.impl.by_name.k": lambda layer, tensor: setattr(layer.impl, "by_name", {"k": tensor}),
    "0.method.kernel.experts.packed": lambda layer, tensor: setattr(
        layer, "method", SimpleNamespace(kernel=SimpleNamespace(experts=SimpleNamespace(packed=tensor)))
    ),
}


@pytest.mark.parametrize("path", PLACES)
def test_it_is_found_wherever_a_module_keeps_it(path):
    model = finished(built())
    PLACES[path](model[0], model[0].weight.float())
    assert stale(model).startswith(f"{path}: vLLM keeps it outside of the parameters")


def test_a_buffer_that_is_written_or_made_anew_after_loading_is_no_constant():
    """Even if its bits are equal: the norms of a fresh model are ones, before and after loading."""
    model = built()
    finished(model, lambda model: model[0].frequencies.copy_(model[0].weight.reshape(-1)[:8]))
    assert stale(model).startswith("0.frequencies: ")
    model = finished(built())
    model[0].impl.slopes = model[0].impl.slopes.clone()
    assert stale(model).startswith("0.impl.slopes: ")


@pytest.mark.parametrize("name", ["kv_cache", "cos_sin_cache"])
def test_caches_that_hold_no_weights_may_come_later(name):
    model = finished(built())
    setattr(model[0], name, [torch.zeros(2, 3)])
    assert stale(model) == ""


def test_captured_graphs_and_what_loading_fills_are_left_out():
    model = finished(built())
    graph = type("CUDAGraphEntry", (), {"__module__": "vllm.compilation.cuda_graph"})()
    graph.output = torch.zeros(2, 3)
    model[0].compiled = [graph]
    model[0].register_buffer("running_mean", torch.zeros(4))
    assert routes.stale(model, {routes.storage_of(model[0].running_mean)}) == ""


def swapped(model: torch.nn.Module) -> None:
    """As kernels for experts on some GPUs want gates and values."""
    weight = model[0].weight
    weight.data = torch.cat([weight[2:] + 1, weight[:2]])


def emptied(model: torch.nn.Module) -> None:
    model[0].weight.data = torch.empty(0)


def removed(model: torch.nn.Module) -> None:
    model[0].weight = None


@pytest.mark.parametrize("finish", [swapped, emptied, removed])
def test_parameters_that_are_changed_after_loading_are_refused_with_the_way_out(finish):
    model = finished(built(), finish)
    assert stale(model).startswith("0.weight: vLLM changes it after loading")
    assert "--moe-backend triton" in stale(model)


@pytest.mark.parametrize("chunk", [routes._CHUNK, 100])
def test_a_device_hashes_every_bit_and_place(monkeypatch, chunk):
    monkeypatch.setattr(routes, "_CHUNK", chunk)
    bits = torch.arange(256, dtype=torch.int16)
    seen = {
        routes.hashed(bits),
        routes.hashed(bits.flip(0)),
        routes.hashed(bits.roll(1)),
        routes.hashed(bits[:0]),
    }
    for place in range(256):
        for bit in range(16):
            other = bits.clone()
            other[place] ^= torch.tensor(1 << bit).to(torch.int16)
            seen.add(routes.hashed(other))
    assert len(seen) == 4 + 256 * 16


def contiguous(model: torch.nn.Module) -> None:
    model[0].weight = torch.nn.Parameter(model[0].weight.clone(), requires_grad=False)


def test_a_parameter_with_the_same_bits_elsewhere_is_not_changed():
    model = built()
    model[0].impl.sinks = None
    assert stale(finished(model, contiguous)) == ""


def test_of_a_model_that_was_not_watched_nothing_is_believed():
    assert stale(torch.nn.Sequential(Attention())).startswith("0.frequencies: ")
