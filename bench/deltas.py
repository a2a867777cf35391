"""The data sets: deltas from a real model's updates, and those in the shape of Qwen3-0.6B.

An update is taken as three kinds of trainers take it, a chunk of elements at a time:

late    an fp32-master trainer after many steps: where a master weight lies among the numbers that round to
        its bf16 value (its cell) is as good as random
grid    an fp32-master trainer soon after it loaded a bf16 checkpoint: master weights are near bf16 values
bf16    a trainer whose only weights are bf16: an update that is less than half a step is lost
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench import updates
from bench.change import Change
from bench.shapes import Shapes, qwen_shapes
from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch

LATE = "fp32 master, late"
GRID = "fp32 master, from bf16"
BF16 = "bf16 weights"
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


STEPS: dict[str, Step] = {LATE: late, GRID: grid, BF16: bf16}


def smollm2(trainer: str = LATE, share: float = 0.01) -> Change:
    """A real update of SmolLM2-135M, at a learning rate that changes `share` of its weights."""
    torch.manual_seed(2)
    weights = updates.weights()
    last = updates.last()
    before = updates.before_last()
    step = STEPS[trainer]
    lr = rate_for(share, step, _thinned(weights), Update(_thinned(last), _thinned(before)))
    old = {}
    patches = []
    for name in weights:
        update = Update(last[name].view(-1), before[name].view(-1))
        pair = step(weights[name].view(-1), update, lr)
        old[name], patch = difference(name, tuple(weights[name].shape), [pair])
        patches.append(patch)
    return Change("SmolLM2-135M", trainer, lr, old, patches)


def qwen(trainer: str = LATE, share: float = 0.01, shapes: Shapes | None = None) -> Change:
    """Weights N(0, 0.02) in the shapes of Qwen3-0.6B, updates drawn from real ones; `share` of it changes."""
    torch.manual_seed(3)
    pool = _pool()
    step = STEPS[trainer]
    lr = rate_for(share, step, *_drawn(pool, 4 * CHUNK))
    old = {}
    patches = []
    for name, shape in (shapes or qwen_shapes()).items():
        numel = math.prod(shape)
        sizes = [CHUNK] * (numel // CHUNK) + [numel % CHUNK]
        old[name], patch = difference(name, shape, [step(*_drawn(pool, size), lr) for size in sizes])
        patches.append(patch)
    return Change("Qwen3-0.6B-shaped", trainer, lr, old, patches)


def _drawn(pool: torch.Tensor, count: int) -> tuple[torch.Tensor, Update]:
    """Random weights with random ones of the real updates."""
    last = pool[torch.randint(len(pool), (count,))]
    return (0.02 * torch.randn(count)).bfloat16(), Update(last, torch.zeros(1))


def _thinned(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Every 61st element of all tensors: a stride that no matrix is periodic in."""
    return torch.cat([tensor.reshape(-1)[::61] for tensor in tensors.values()])


def _pool() -> torch.Tensor:
    """A sample of the real updates, fp32."""
    return _thinned(updates.last()).float()


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
    low = 1e-9
    high = 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        if share_of_changes(step, weights, update, middle) < share:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
