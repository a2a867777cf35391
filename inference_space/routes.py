"""Checkpoint coordinates -> places in the runtime parameters, learned once from the model's own loader.

vLLM fuses and renames: `q_proj`, `k_proj` and `v_proj` become rows of one `qkv_proj`. Its `load_weights`
knows how, so each tensor's name is loaded once with a probe while `Tensor.copy_` only records where the copy
would go. A route is the recorded destination: writing the checkpoint's flat position `i` means writing
`route[i]`. vLLM's own sparse loader rests on the same hook; what it does per update is done here once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class RouteError(RuntimeError):
    """A tensor whose place in the runtime model is not a plain copy; the message names it."""


def learn(model: torch.nn.Module, shapes: Mapping[str, Iterable[int]]) -> dict[str, torch.Tensor]:
    """Routes of every tensor: name -> flat int16 view [numel] of its live bf16 elements, row-major.

    Nothing is written. Raises `RouteError` for a tensor that the loader drops, splits, transposes or casts.
    """
    return {name: _route(model, name, tuple(shape)) for name, shape in shapes.items()}


def _route(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    probe = torch.empty(shape, dtype=torch.bfloat16)
    with _recorded_copies() as copies:
        model.load_weights([(name, probe)])
    if len(copies) != 1:
        raise RouteError(f"{name}: vLLM's loader made {len(copies)} copies, one was expected")
    destination, source = copies[0]
    if source.data_ptr() != probe.data_ptr() or source.shape != probe.shape or not source.is_contiguous():
        raise RouteError(f"{name}: vLLM's loader splits or transposes it (tensor parallelism > 1?)")
    if destination.dtype != torch.bfloat16 or not destination.is_contiguous():
        raise RouteError(
            f"{name}: its runtime parameter is not contiguous bf16; start vLLM with --dtype bfloat16"
        )
    return destination.detach().view(torch.int16).view(-1)


@contextmanager
def _recorded_copies() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((destination, source))
        return destination

    original: Any = torch.Tensor.copy_
    torch.Tensor.copy_ = record  # type: ignore[assignment, method-assign]
    try:
        yield copies
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
