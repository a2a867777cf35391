"""Weights in a GPU's memory, laid out as checkpoints have them, and changes of every hundredth of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from bench.deltas import qwen_shapes
from bench.model import memory_of
from delta_weight_sync.vllm.memory import Changes, Found, collect

Shapes = Mapping[str, tuple[int, ...]]
_FIRST, _EVERY = 7, 100


class Replica:
    """Tensors of some shapes with random bits, as a replica has them."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.elements = sum(map(math.prod, shapes.values()))
        self.flat = torch.empty(self.elements, dtype=torch.int16, device=device)
        self.flat.random_(-(1 << 15), 1 << 15)
        parts = self.flat.split([math.prod(shape) for shape in shapes.values()])
        pairs = zip(shapes.items(), parts, strict=True)
        self.tensors = {name: part.view(torch.bfloat16).view(shape) for (name, shape), part in pairs}
        self.table, self.memory = memory_of(self.tensors)

    def changes(self) -> Changes:
        """One ULP more for one of a hundred weights of each tensor."""
        return collect(
            (_changed(row, size) for row, size in enumerate(self.table.elements.tolist())), self.table
        )


def _changed(row: int, size: int) -> Found:
    element = np.arange(min(_FIRST, size - 1), size, _EVERY, dtype=np.int32)
    return row, element, np.ones(element.size, np.int16)


def shapes_8b() -> Shapes:
    """Qwen3-8B."""
    return qwen_shapes(layers=36, hidden=4096, heads=4096, inner=12288) | {"lm_head.weight": (151936, 4096)}


def shapes_experts(layers: int = 48, experts: int = 128) -> Shapes:
    """Qwen3-30B-A3B: 128 experts in each layer, 18,867 tensors."""
    dense = qwen_shapes(layers=layers, hidden=2048, heads=4096, kv=512, inner=0)
    kinds = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
    routed = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": shape
        for layer in range(layers)
        for expert in range(experts)
        for kind, shape in kinds.items()
    }
    routers = {f"model.layers.{layer}.mlp.gate.weight": (experts, 2048) for layer in range(layers)}
    return {**dense, **routed, **routers, "lm_head.weight": (151936, 2048)}
