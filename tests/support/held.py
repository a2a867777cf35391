"""Whole tensors as the outbox takes them."""

from collections.abc import Iterable, Iterator

import torch

from delta_weight_sync.publish.blocks import Block
from delta_weight_sync.publish.sharding import Held


def held(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Held]:
    """Tensors that versions hold in bf16, under the same names."""
    for name, tensor in weights:
        shape = tuple(tensor.shape)
        lasting = isinstance(tensor, torch.nn.Parameter)
        yield Held(name, "BF16", shape, tensor.detach(), Block.whole(shape), is_lasting=lasting)
