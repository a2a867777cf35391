"""What a publisher does with its mirror, for tests and benchmarks without a publisher."""

from collections.abc import Iterable, Iterator

import torch

from delta_weight_sync.publish.blocks import Block, Part
from delta_weight_sync.publish.mirror import Found, Mirror


def find(mirror: Mirror, parts: Iterable[Part]) -> Found:
    """What changed in the parts since the last sync."""
    search = mirror.search()
    for part in parts:
        search.add(part)
    return search.found()


def whole_parts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Part]:
    """What one process compares of its parameters: all of them."""
    return (Part(name, tensor, Block.whole(tensor.shape), True) for name, tensor in tensors)
