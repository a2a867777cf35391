"""What TRL needs to train on a CPU, in float32, or without the package `kernels`.

`patches` puts `attention` and `peak_flops` into TRL, and says when to remove them.
"""

import functools
import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer

_PEAK_FLOPS: Any = getattr(async_grpo_trainer, "get_peak_flops_per_device", None)
# Before 2.12, torch has no such argument, and its kernel takes fewer key heads without being asked.
_GQA: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _GQA["enable_gqa"] = True
_ROUNDING = 0.1  # in `_require_same_mask`: 16-bit rounding changes results by 0.01, another mask by 1


def peak_flops(accelerator: Any, dtype: str) -> float | None:
    """Return what TRL's function does for a GPU, and None for a CPU."""
    return _PEAK_FLOPS(accelerator, dtype) if accelerator.device.type == "cuda" else None


def attention(
    *packed: Any,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Do what FlashAttention's varlen function does: with `varlen_attn` for 16 bits on a GPU, else with SDPA.

    `packed`: q [queries, heads, head_dim]; k and v [keys, heads or fewer, head_dim]; cumulative lengths of
    the sequences in q, then in k (int32 [sequences + 1]); the longest length in q, then in k. The last query
    of a sequence has the position of the sequence's last key. Each query sees the key at its own position and
    `window_size[0]` keys before that (-1: all).
    """
    if softcap or not causal:
        raise ValueError("this attention is always causal and has no soft caps: train another model")
    if _kernel_takes(packed[0]):
        _require_same_mask(packed[0].device)
        return _kernel(*packed, scale=softmax_scale, before=window_size[0])
    return _one_by_one(*packed, scale=softmax_scale, before=window_size[0])


def _kernel_takes(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def _require_same_mask(device: torch.device) -> None:
    """Raise `RuntimeError` unless the kernel masks as `_one_by_one` does. Runs once per device."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=random).to(device).bfloat16() for shape in ((3, 4, 16), (7, 2, 16)))
    starts = torch.tensor([[0, 1, 3], [0, 3, 7]], dtype=torch.int32).to(device)
    for before in (-1, 1):
        theirs = _kernel(q, k, k, *starts, 2, 4, scale=None, before=before)
        ours = _one_by_one(q, k, k, *starts, 2, 4, scale=None, before=before)
        if not torch.allclose(theirs, ours, rtol=0.0, atol=_ROUNDING):
            raise RuntimeError(
                f"torch {torch.__version__} masks attention unlike FlashAttention: pip install torch==2.13.0"
            )


def _kernel(*packed: Any, scale: float | None, before: int) -> torch.Tensor:
    out = varlen_attn(*packed, scale=scale, window_size=(before, 0), **_GQA)
    assert isinstance(out, torch.Tensor)  # `varlen_attn` returns a pair only with `return_aux`
    return out


def _one_by_one(*packed: Any, scale: float | None, before: int) -> torch.Tensor:
    q, k, v, starts_q, starts_k, *_ = packed
    # lengths of the sequences
    queries = starts_q.diff().tolist()
    keys = starts_k.diff().tolist()
    # Use `split`, because the gradient of a slice would be as large as the whole tensor.
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_attend(*part, scale, before) for part in parts])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, before: int
) -> torch.Tensor:
    mask = None
    ahead = len(k) - len(q)
    if ahead or before >= 0:  # bool [queries, keys]: which keys each query sees
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(ahead)
        mask = mask if before < 0 else mask.triu(ahead - before)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # heads first
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)
