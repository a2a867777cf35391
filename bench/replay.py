"""One AdamW update of bf16 weights, as three kinds of trainers take it; a chunk of elements at a time.

late    an fp32-master trainer after many steps: where a master weight lies among the numbers that round to
        its bf16 value (its cell) is as good as random
grid    an fp32-master trainer soon after it loaded a bf16 checkpoint: master weights are near bf16 values
bf16    a trainer whose only weights are bf16: an update that is less than half a step is lost
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch

CHUNK = 1 << 20  # elements; what a step needs of them stays in the cache
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """Directions of an optimizer, of any float dtype: the last one, and the sum of those before it."""

    last: torch.Tensor
    before: torch.Tensor


Step = Callable[[torch.Tensor, Update, float], Pair]
"""(bf16 weights, update, learning rate) -> bf16 weights before and after the step."""


def late(weights: torch.Tensor, update: Update, lr: float) -> Pair:
    """Step of master weights that are uniform within their cells."""
    master = weights.float() + (torch.rand(weights.shape) - 0.5) * cell(weights)
    return master.bfloat16(), (master - lr * update.last.float()).bfloat16()


def grid(weights: torch.Tensor, update: Update, lr: float) -> Pair:
    """Step of master weights that were bf16 weights a few steps ago."""
    master = weights.float() - lr * update.before.float()
    return master.bfloat16(), (master - lr * update.last.float()).bfloat16()


def bf16(weights: torch.Tensor, update: Update, lr: float) -> Pair:
    """Step of weights that are rounded to bf16 each time."""
    return weights, (weights.float() - lr * update.last.float()).bfloat16()


def cell(weights: torch.Tensor) -> torch.Tensor:
    """Distance from each bf16 number to the next one in its octave: fp32, zero for zeros and subnormals."""
    exponent = weights.view(torch.int16) & 0x7F80
    return exponent.view(torch.bfloat16).float() * 2.0**-7


def difference(name: str, shape: tuple[int, ...], chunks: list[Pair]) -> tuple[Bits, Patch]:
    """(old bits, patch) of a tensor from the flat bf16 chunks before and after a step."""
    old, new = (
        torch.cat(side).view(torch.uint16).numpy().reshape(shape) for side in zip(*chunks, strict=True)
    )
    return old, codec.diff(name, old, new)


def share_of_changes(step: Step, weights: torch.Tensor, update: Update, lr: float) -> float:
    """Share of elements whose bits a step changes."""
    old, new = step(weights, update, lr)
    return float((old.view(torch.int16) != new.view(torch.int16)).float().mean())


def rate_for(share: float, step: Step, weights: torch.Tensor, update: Update) -> float:
    """The learning rate at which a step changes `share` of these weights, by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        if share_of_changes(step, weights, update, middle) < share:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
