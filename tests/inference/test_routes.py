"""Routes are learned from a loader like vLLM's, and refused where writing through them would be wrong."""

import pytest
import torch

from inference_space import routes


class Fused(torch.nn.Module):
    """Loads as vLLM does: q, k and v become rows of one parameter, norms are copied as they are."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(8, 4, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        self.down = torch.nn.Parameter(torch.zeros(4, 8, dtype=dtype))

    def load_weights(self, weights):
        rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
        for name, tensor in weights:
            if name in rows:
                self.qkv.data.narrow(0, *rows[name]).copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "transposed":
                self.down.data.copy_(tensor.t())
            elif name == "sharded":
                self.down.data.copy_(tensor.narrow(0, 4, 4))
            elif name == "scaled":
                self.norm.data.copy_(tensor * 2)


def test_a_write_through_a_route_is_what_loading_would_do():
    shapes = {"q": [4, 4], "k": [2, 4], "v": [2, 4], "norm": [4]}
    routed, loaded = Fused(), Fused()
    places = routes.learn(routed, shapes)
    assert torch.equal(routed.qkv, torch.zeros(8, 4)), "learning writes nothing"
    for name, shape in shapes.items():
        weights = torch.randn(shape).to(torch.bfloat16)
        loaded.load_weights([(name, weights)])
        index = torch.arange(weights.numel())
        places[name].index_copy_(0, index, weights.reshape(-1).view(torch.int16))
    assert torch.equal(routed.qkv, loaded.qkv)
    assert torch.equal(routed.norm, loaded.norm)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("transposed", [8, 4], "splits or transposes"),
        ("sharded", [8, 8], "splits or transposes"),
        ("scaled", [4], "splits or transposes"),
        ("unknown", [4], "made 0 copies"),
    ],
)
def test_what_is_not_a_plain_copy_is_refused_by_name(name, shape, why):
    with pytest.raises(routes.RouteError, match=f"{name}: vLLM's loader {why}"):
        routes.learn(Fused(), {name: shape})


def test_a_model_in_another_precision_is_refused():
    with pytest.raises(routes.RouteError, match="not contiguous bf16"):
        routes.learn(Fused(torch.float32), {"norm": [4]})


def test_copying_works_again_after_a_failure():
    with pytest.raises(routes.RouteError):
        routes.learn(Fused(), {"unknown": [4]})
    assert torch.zeros(2).copy_(torch.ones(2)).sum() == 2
