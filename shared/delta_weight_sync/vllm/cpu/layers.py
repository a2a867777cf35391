"""Linears, experts, convolutions and norms of vLLM's CPU backend, computed from live weights."""

import math
import timeit
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

_MANY = 32  # rows of an input; if bf16 is faster for this many, it is faster for any number
_TILE = 1 << 19  # elements of a weight that are cast to float32 at a time: 2 MiB, which fit into the caches
_ROWS = 256  # rows of an input that one multiplication takes; with more, the caches lose the tile


class LiveLinear:
    """Computes `x @ weight.T + bias` from a parameter's memory, without a Parameter's slow dispatch."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.memory = weight.data

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the layer; `weight` is the parameter itself, as vLLM passes it."""
        if x.dtype is not torch.bfloat16 or x.numel() <= _rows_in_bf16() * x.shape[-1]:
            return functional.linear(x, self.memory, bias)
        return linear_in_float32(x, self.memory, bias)


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute bf16 `x @ weight.T + bias` in float32, by tiles of `weight` and blocks of rows of `x`."""
    wide = x.reshape(-1, x.shape[-1]).float()
    tile = max(1, _TILE // weight.shape[1])
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
        from delta_weight_sync.vllm.cpu.norms import normalize  # imported late: see `plugin`

        out = torch.empty(x.shape, dtype=x.dtype)
        added = residual.data_ptr() if residual is not None else 0
        columns, step = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)  # 2 dimensions: one column
        addresses = (x.data_ptr(), added, self.weight.data_ptr(), out.data_ptr())
        normalize(addresses, (len(x), columns, x.shape[-1], x.stride(0), step), self.variance_epsilon)
        return out if residual is None else (out, residual)  # `normalize` has added x to the residual

    return norm


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
    wide = x.float()
    kind = activation.value
    if kind == "swigluoai":  # gates and values alternate
        gate = wide[:, ::2].clamp(max=7.0)
        value = wide[:, 1::2].clamp(-7.0, 7.0)
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
