"""Patches vLLM's CPU backend, so that it computes from live weights; `hooks` names the patched code.

1. After loading, the backend packs Linears, mostly into an opaque oneDNN handle, and drops the weight. (An LM
   head keeps its weight, but no longer uses it.) So later writes have no effect. `install` makes Linears
   compute from the live weight, in float32 if that is faster, as on CPUs without AVX-512.
2. The backend also packs the experts of a mixture of experts (MoE). `install` leaves experts as loaded, and
   computes the chosen ones one after the other, which is exact, but slower than vLLM's packed kernel.
3. The backend packs the weights of short convolutions (for example in gated delta nets) in place. `install`
   leaves these weights as loaded, and makes the kernels take them unpacked.
4. If a seeded request's prefill is split, vLLM rewinds the request's random generator, which crashes the
   engine on a CPU. (TRL seeds every request.) `install` hides the generator from that code.
5. vLLM inspects a model's class in a separate process, and caches the result. That process takes ten seconds
   to import vLLM, and only CUDA needs it. `install` makes vLLM inspect the class in its own process.
6. vLLM's RMS norm is ten operations, a tenth of a small model's step. `install` makes the norm one kernel.

upstream/vllm/0005 would end 1, 2 and 3; 0006 would end 4; 0007 would end 5. Nothing is proposed for 6.

`self_test` raises an error if patch 1 or 2 has no effect. `routes` refuses a model with packed convolutions.
"""

import math
import operator
import timeit
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from delta_weight_sync.vllm import hooks

_MANY = 32  # rows of an input; if bf16 is faster for this many, it is faster for any number
_TILE = 1 << 19  # elements of a weight that are cast to float32 at a time: 2 MiB, which fit into the caches
_ROWS = 256  # rows of an input that one multiplication takes; with more, the caches lose the tile
_stock_dispatch: Any = None


def install() -> None:
    """Patch vLLM in this process, before it loads a model. A second call does nothing."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models import registry
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if utils.dispatch_cpu_unquantized_gemm is _keep_weight_live:
        return
    global _stock_dispatch
    _stock_dispatch = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = _keep_weight_live
    if hooks.CPU_EXPERTS.works():
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        CPUUnquantizedExperts.process_weights_after_loading = _keep_experts_live
        CPUUnquantizedExperts.apply = apply_live_experts
    if hooks.CPU_CONVOLUTIONS.works():
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
            setattr(gdn_attention, name, from_live_weight(getattr(gdn_attention, name)))
    if hooks.CPU_SEEDS.works():
        GPUModelRunner._bookkeeping_sync = _without_rewinds(GPUModelRunner._bookkeeping_sync)
    if hooks.CPU_START.works():
        registry._run_in_subprocess = operator.call
    if hooks.CPU_NORMS.works():
        from vllm.model_executor.layers.layernorm import RMSNorm

        RMSNorm.forward_cpu = norm_in_one_kernel(RMSNorm.forward_native)


def self_test(model: torch.nn.Module) -> None:
    """Raise `RuntimeError` if a layer of the loaded model does not compute from its live weight."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "cpu_linear")]
    for name, module in layers:
        linear, weight = module.cpu_linear, module.weight
        live = linear is functional.linear  # an unpacked layer: each call passes its weight
        if isinstance(linear, _LiveLinear):
            live = linear.memory.is_set_to(weight.data)
        if weight.ndim == 2 and not (live and weight.numel()):
            raise RuntimeError(f"{name} does not compute from its weight: install a tested release of vLLM")
    if not layers:
        raise RuntimeError("the model has no CPU linear layer: install a tested release of vLLM")
    for name, module in model.named_modules():
        moe = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        kind = type(moe.fused_experts) if moe else None
        ours = _keep_experts_live, apply_live_experts
        if kind and (kind.process_weights_after_loading, kind.apply) != ours:
            raise RuntimeError(f"{name} computes from packed experts: install a tested release of vLLM")


def _keep_weight_live(layer: Any, remove_weight: bool) -> None:
    if layer.weight.is_meta:  # a layer that this process does not have; vLLM's function packs nothing
        _stock_dispatch(layer, remove_weight)
    elif layer.weight.ndim == 2:  # not a convolution, whose weight stays as loaded: see 3
        layer.cpu_linear = _LiveLinear(layer.weight)


class _LiveLinear:
    """Computes `x @ weight.T + bias` from a parameter's memory, without a Parameter's slow dispatch."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.memory = weight.data

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or x.numel() <= _rows_in_bf16() * x.shape[-1]:
            return functional.linear(x, self.memory, bias)
        return linear_in_float32(x, self.memory, bias)


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute bf16 `x @ weight.T + bias` in float32, by tiles of `weight` and blocks of rows of `x`."""
    wide, tile = x.reshape(-1, x.shape[-1]).float(), max(1, _TILE // weight.shape[1])
    out = x.new_empty(len(wide), len(weight))
    for start in range(0, len(weight), tile):
        part = slice(start, start + tile)
        parameters = weight[part].float(), None if bias is None else bias[part].float()
        for rows, result in zip(wide.split(_ROWS), out.split(_ROWS), strict=True):
            result[:, part] = functional.linear(rows, *parameters)
    return out.view(*x.shape[:-1], len(weight))


@cache
def _rows_in_bf16() -> float:
    """Measure once up to how many input rows this CPU is faster in bf16 than in float32 (infinity: any)."""
    weight = torch.ones(512, 512, dtype=torch.bfloat16)
    for rows in (_MANY, 16, 8, 4, 2, 1):
        x = torch.ones(rows, 512, dtype=torch.bfloat16)
        bf16, float32 = (
            min(timeit.repeat(partial(linear, x, weight, None), number=1, repeat=9))
            for linear in (functional.linear, linear_in_float32)
        )
        if bf16 < float32:
            return math.inf if rows == _MANY else rows
    return 0


def norm_in_one_kernel(native: Any) -> Any:
    """Return a faster equivalent of `native`, vLLM's RMS norm in PyTorch operations."""

    def norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        usual = type(self).forward_native is native and self.has_weight and not self.variance_size_override
        usual = usual and x.dtype is self.weight.dtype is torch.bfloat16 and x.ndim in (2, 3)
        if not usual or x.stride(-1) != 1 or not (residual is None or residual.is_contiguous()):
            return self.forward_native(x, residual)
        from delta_weight_sync.vllm.norms import normalize  # imported late: see `plugin`

        out, added = torch.empty(x.shape, dtype=x.dtype), residual.data_ptr() if residual is not None else 0
        columns, step = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)  # 2 dimensions: one column
        addresses = (x.data_ptr(), added, self.weight.data_ptr(), out.data_ptr())
        normalize(addresses, (len(x), columns, x.shape[-1], x.stride(0), step), self.variance_epsilon)
        return out if residual is None else (out, residual)  # `normalize` has added x to the residual

    return norm


def _keep_experts_live(experts: Any, layer: torch.nn.Module) -> None:
    """Do nothing, instead of vLLM's packing of experts."""


def apply_live_experts(
    experts: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **_options: Any,
) -> None:
    """Write the weighted sum of each token's chosen experts to `output` [tokens, hidden]."""
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (b if b is None else b[expert] for b in (experts.w1_bias, experts.w2_bias))
        up = functional.linear(hidden_states[token], w1[expert], up_bias)
        down = functional.linear(_activated(activation, up), w2[expert], down_bias)
        if not apply_router_weight_on_input:  # otherwise the input is already weighted
            down = down * topk_weights[token, choice].unsqueeze(1)
        total.index_add_(0, token, down.float())
    output.copy_(total)


def _activated(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply a gated activation of vLLM's CPU experts, in float32 as vLLM does."""
    wide, kind = x.float(), activation.value
    if kind == "swigluoai":  # gates and values alternate
        gate, value = wide[:, ::2].clamp(max=7.0), wide[:, 1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (value + 1)).to(x.dtype)
    gate, value = wide.chunk(2, dim=1)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    active = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate=approximate)
    return (active * value).to(x.dtype)


def from_live_weight(convolve: Any) -> Any:
    """Wrap a convolution of vLLM, so that it takes the weight [channels, 1, width] unpacked."""

    def convolved(*, weight: torch.Tensor, is_weight_packed: bool, **options: Any) -> Any:
        return convolve(weight=weight.flatten(1), is_weight_packed=False, **options)

    return convolved


def _without_rewinds(bookkeeping: Any) -> Any:
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators, discard = runner.input_batch.generators, runner.discard_request_mask.np
        hidden = {i: generators.pop(i) for i in list(generators) if discard[i]}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(hidden)

    return wrapped
