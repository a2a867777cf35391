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

import operator
from typing import Any

import torch
from torch.nn import functional

from delta_weight_sync.vllm import hooks
from delta_weight_sync.vllm.cpu.layers import (
    LiveLinear,
    apply_live_experts,
    from_live_weight,
    norm_in_one_kernel,
)

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
        linear = module.cpu_linear
        weight = module.weight
        live = linear is functional.linear  # an unpacked layer: each call passes its weight
        if isinstance(linear, LiveLinear):
            live = linear.memory.is_set_to(weight.data)
        if weight.ndim == 2 and not (live and weight.numel()):
            raise RuntimeError(f"{name} does not compute from its weight: install a tested release of vLLM")
    if not layers:
        raise RuntimeError("the model has no CPU linear layer: install a tested release of vLLM")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):  # quantized: see `quantized`
            continue
        moe = getattr(method, "moe_kernel", None)
        kind = type(moe.fused_experts) if moe else None
        ours = _keep_experts_live, apply_live_experts
        if kind and (kind.process_weights_after_loading, kind.apply) != ours:
            raise RuntimeError(f"{name} computes from packed experts: install a tested release of vLLM")


def _keep_weight_live(layer: Any, remove_weight: bool) -> None:
    if layer.weight.is_meta:  # a layer that this process does not have; vLLM's function packs nothing
        _stock_dispatch(layer, remove_weight)
    elif layer.weight.ndim == 2:  # not a convolution, whose weight stays as loaded: see 3
        layer.cpu_linear = LiveLinear(layer.weight)


def _keep_experts_live(experts: Any, layer: torch.nn.Module) -> None:
    """Do nothing, instead of vLLM's packing of experts."""


def _without_rewinds(bookkeeping: Any) -> Any:
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        discard = runner.discard_request_mask.np
        hidden = {i: generators.pop(i) for i in list(generators) if discard[i]}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(hidden)

    return wrapped
