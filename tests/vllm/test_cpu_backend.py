"""Live layers, experts and norms compute what vLLM's do, and a layer that computes from a copy is found."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from delta_weight_sync.vllm import cpu
from delta_weight_sync.vllm.cpu import layers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of torch that are deprecated
    from vllm import _custom_ops as ops
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.layernorm import RMSNorm

pytestmark = pytest.mark.live  # vLLM's own kernels

TOKENS = 9
HIDDEN = 64
INNER = 96
EXPERTS = 5


def bf16(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) / 4).to(torch.bfloat16)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("weighted_before", [False, True], ids=["weighted after", "weighted before"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_live_experts_compute_what_packed_ones_do(kind, weighted_before, biased):
    torch.manual_seed(0)
    x = 4 * bf16(TOKENS, HIDDEN)
    w13 = bf16(EXPERTS, 2 * INNER, HIDDEN)
    w2 = bf16(EXPERTS, HIDDEN, INNER)
    b13, b2 = (bf16(EXPERTS, 2 * INNER), bf16(EXPERTS, HIDDEN)) if biased else (None, None)
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(1 if weighted_before else 2)
    ids = ids.to(torch.int32)
    packed = torch.empty_like(x)
    live = torch.empty_like(x)
    parts = [cpu_prepack_moe_weight(weight, "vec") for weight in (w13, w2)]
    cpu_fused_moe(packed, x, *parts, b13, b2, weights, ids, kind, "vec", weighted_before)
    layers.apply_live_experts(
        SimpleNamespace(w1_bias=b13, w2_bias=b2),
        output=live,
        hidden_states=x,
        w1=w13,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation(kind),
        apply_router_weight_on_input=weighted_before,
    )
    error = (live - packed).float().norm()
    size = packed.float().norm()
    assert error < 0.01 * size, "bf16 rounds to 1/256, at other places in the two"


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("tile", "rows"), [(1 << 20, 256), (40 * HIDDEN, 3)], ids=["one tile", "many tiles"])
def test_a_layer_in_float32_computes_from_the_live_weight(monkeypatch, tile, rows, biased):
    monkeypatch.setattr(layers, "_TILE", tile)
    monkeypatch.setattr(layers, "_ROWS", rows)
    monkeypatch.setattr(layers, "_rows_in_bf16", lambda: 0)
    torch.manual_seed(0)
    x = bf16(TOKENS, HIDDEN)
    weight = torch.nn.Parameter(bf16(INNER, HIDDEN))
    bias = bf16(INNER)
    layer = layers.LiveLinear(weight)
    for _ in range(2):
        exact = x.double() @ weight.data.double().T + (bias.double() if biased else 0)
        result = layer(x, weight, bias if biased else None)
        torch.testing.assert_close(result, exact.to(torch.bfloat16), rtol=1 / 128, atol=1e-4)
        weight.data[3:5] += 1  # a commit


class Norm(SimpleNamespace):
    forward_native = RMSNorm.forward_native


@pytest.mark.parametrize("heads", [None, 3], ids=["tokens", "heads of a fused projection"])
def test_a_norm_in_one_kernel_is_that_of_vllm(heads):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(1 + bf16(HIDDEN))
    module = Norm(weight=weight, variance_epsilon=1e-6, has_weight=True, variance_size_override=None)
    x = bf16(TOKENS, HIDDEN) if heads is None else bf16(TOKENS, heads + 2, HIDDEN)[:, 1:-1]
    norm = layers.norm_in_one_kernel(RMSNorm.forward_native)
    for residual in (torch.zeros(x.shape, dtype=x.dtype), bf16(*x.shape)):
        wide = x.double() + residual.double()
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.data.double()
        result, held = norm(module, x, residual)
        assert torch.equal(held, wide.to(torch.bfloat16))
        torch.testing.assert_close(result, exact.to(torch.bfloat16), rtol=1 / 128, atol=1e-5)
        weight.data[3:5] += 1  # a commit
    assert torch.equal(norm(module, x), norm(module, x, torch.zeros_like(held))[0])


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM has kernels of short convolutions, packed or not, only for CPUs with AVX-512 for bf16",
)
def test_a_convolution_from_the_live_weight_is_that_from_the_packed_one():
    torch.manual_seed(0)
    weight = bf16(HIDDEN, 1, 4)
    x = bf16(HIDDEN, TOKENS).t().contiguous().t()
    options = {
        "x": x,
        "bias": None,
        "conv_states": torch.zeros(1, 3, HIDDEN, dtype=torch.bfloat16).transpose(1, 2),
        "query_start_loc": torch.tensor([0, TOKENS], dtype=torch.int32),
        "cache_indices": torch.zeros(1, dtype=torch.int32),
        "has_initial_state": torch.zeros(1, dtype=torch.bool),
        "silu_activation": True,
    }
    packed = ops.causal_conv1d_fwd_cpu(
        weight=ops.causal_conv1d_weight_pack(weight.flatten(1)), is_weight_packed=True, **options
    )
    live = layers.from_live_weight(ops.causal_conv1d_fwd_cpu)(weight=weight, is_weight_packed=True, **options)
    assert torch.equal(packed, live)
    assert packed.abs().sum() > 0


def model_of(linear: object, experts: type) -> torch.nn.Module:
    """A model with one Linear and one layer of experts, as vLLM leaves them after loading."""
    model = torch.nn.Module()
    model.dense = torch.nn.Linear(4, 4, bias=False)
    model.dense.cpu_linear = linear
    model.moe = torch.nn.Module()
    model.moe.quant_method = SimpleNamespace(
        moe_kernel=SimpleNamespace(fused_experts=object.__new__(experts))
    )
    return model


def test_a_layer_that_computes_from_a_copy_is_found():
    class Packed(CPUUnquantizedExperts):
        def apply(self, **options):
            """From a copy of the weights."""

    with pytest.raises(RuntimeError, match="dense does not compute from its weight"):
        cpu.self_test(model_of(lambda x, weight, bias: x, Packed))
    with pytest.raises(RuntimeError, match="moe computes from packed experts"):
        cpu.self_test(model_of(torch.nn.functional.linear, Packed))
