"""What vLLM's CPU backend needs so that weights stay live, pinned to the internals of vLLM 0.32.

1. After loading, the backend packs every Linear into an opaque oneDNN handle and drops the weight (or, for
   embeddings, computes from a packed copy), so that a later write to the weight changes nothing. `install`
   makes it compute from the live weight instead.
2. A seeded request whose prefill was split rewinds its random generator by an offset that CPU generators do
   not have, which kills the engine. TRL seeds every request. `install` hides those generators for that step.

`self_test` fails loudly where either no longer holds.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Patch vLLM in this process, before it loads a model. Idempotent."""
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if utils.dispatch_cpu_unquantized_gemm is _keep_weight_live:
        return
    global _stock_dispatch
    _stock_dispatch = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = _keep_weight_live
    GPUModelRunner._bookkeeping_sync = _without_rewinds(GPUModelRunner._bookkeeping_sync)


def self_test(model: torch.nn.Module) -> None:
    """Raise `RuntimeError` if a layer of the loaded model computes from anything but its live weight."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "cpu_linear")]
    for name, module in layers:
        if module.weight.ndim == 2 and not _computes_from(module.cpu_linear, module.weight):
            raise RuntimeError(f"{name} does not compute from its weight; this vLLM needs another patch")
    if not layers:
        raise RuntimeError("found no CPU linear layer; this vLLM needs another patch")


_stock_dispatch: Any = None


def _keep_weight_live(layer: torch.nn.Module, remove_weight: bool) -> None:
    if layer.weight.is_meta or layer.weight.ndim != 2:
        _stock_dispatch(layer, remove_weight)
    else:
        layer.cpu_linear = _LiveLinear(layer.weight)


class _LiveLinear:
    """`x @ weight.T + bias` from the parameter's own memory.

    It goes around vLLM's parameter class, whose dispatch costs as much as a small matrix product.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.memory = weight.data

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.memory, bias)


def _computes_from(linear: object, weight: torch.Tensor) -> bool:
    if not isinstance(linear, _LiveLinear) or weight.numel() == 0:
        return False
    return linear.memory.data_ptr() == weight.data_ptr() and linear.memory.shape == weight.shape


def _without_rewinds(bookkeeping: Any) -> Any:
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators, discard = runner.input_batch.generators, runner.discard_request_mask.np
        hidden = {i: generators.pop(i) for i in list(generators) if discard[i]}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(hidden)

    return wrapped
