"""Compares packed attention in PyTorch's kernel, forward and backward, with each sequence alone in fp64."""

import itertools

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_check.report import Row, Rows
from delta_weight_sync.trl import patches

_LENGTHS, _HEADS, _SIZE = (700, 1, 333, 64), (16, 8), 128  # of Qwen3-0.6B
_OFF = 0.03  # allowed error, as a share of the largest number: bf16 keeps eight bits


def rows(device: torch.device) -> Rows:
    """One row for the forward pass, one for each gradient."""
    generator = torch.Generator().manual_seed(0)
    heads = (_HEADS[0], _HEADS[1], _HEADS[1])
    exact = [torch.randn(sum(_LENGTHS), n, _SIZE, generator=generator, dtype=torch.float64) for n in heads]
    given = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in exact]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in given]
    starts = torch.tensor([0, *itertools.accumulate(_LENGTHS)], dtype=torch.int32, device=device)
    packed = patches._varlen_attention(*given, starts, starts, max(_LENGTHS), max(_LENGTHS))
    alone = torch.cat([_alone(*parts) for parts in zip(*(t.split(_LENGTHS) for t in exact), strict=True)])
    yield Row("the packed kernel takes bf16, as autocast gives it", right=patches._kernel_takes(given[0]))
    yield _near("forward", packed, alone)
    packed.square().sum().backward()
    alone.square().sum().backward()
    for name, ours, theirs in zip(("q", "k", "v"), given, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        yield _near(f"gradient of {name}", ours.grad, theirs.grad)


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _near(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> Row:
    off = float((ours.detach().double().cpu() - theirs.detach()).abs().max() / theirs.detach().abs().max())
    return Row(f"attention, {what}", f"off by {off:.1g} of the largest number", off <= _OFF)
