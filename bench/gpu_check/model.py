"""Weights in a GPU's memory, in the layout of checkpoints, and changes of one in a hundred of them."""

import math

import numpy as np
import torch

from bench.model import memory_of
from bench.shapes import Shapes
from delta_weight_sync.vllm.memory import Changes

_FIRST = 7
_EVERY = 100


class Replica:
    """Tensors of the given shapes with random bits, as a replica holds them."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.elements = sum(map(math.prod, shapes.values()))
        self.flat = torch.empty(self.elements, dtype=torch.int16, device=device)
        self.flat.random_(-(1 << 15), 1 << 15)
        parts = self.flat.split([math.prod(shape) for shape in shapes.values()])
        pairs = zip(shapes.items(), parts, strict=True)
        self.tensors = {name: part.view(torch.bfloat16).view(shape) for (name, shape), part in pairs}
        self.table, self.memory = memory_of(self.tensors)

    def changes(self) -> Changes:
        """Changes that add one ULP to one in a hundred weights of each tensor."""
        return Changes.joined(_changed(row, size) for row, _, size in self.table.parts.tolist())


def _changed(row: int, size: int) -> Changes:
    element = np.arange(min(_FIRST, size - 1), size, _EVERY, dtype=np.int32)
    return Changes(np.array([row]), np.array([element.size]), element, np.ones(element.size, np.uint16))
