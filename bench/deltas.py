"""The data sets: real deltas, deltas from a real model's updates, and those in the shape of Qwen3-0.6B."""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from bench import replay, updates
from bench.change import Change
from bench.replay import CHUNK, Step, Update
from bench.results import ROOT
from bench.shapes import Shapes, qwen_shapes
from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch

_STORED = ROOT.parent / "shared" / "data" / "deltas"
LATE, GRID, BF16 = "fp32 master, late", "fp32 master, from bf16", "bf16 weights"
STEPS: dict[str, Step] = {LATE: replay.late, GRID: replay.grid, BF16: replay.bf16}


def stored() -> Iterator[Change]:
    """The last step of a real run at two learning rates, where the checkout has it beside it; else none."""
    if not _STORED.exists():
        return
    spec = importlib.util.spec_from_file_location("stored_deltas", _STORED / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for lr in ("1e-05", "3e-06"):
        *_, (_, old, new) = module.chain("diffused", lr)
        model = f"13 M weights of SmolLM2-135M, lr {lr}"
        yield Change(model, LATE, float(lr), *_cut(old, new, module.tensors()))


def _cut(
    old: Bits, new: Bits, tensors: Sequence[tuple[str, list[int]]]
) -> tuple[dict[str, Bits], list[Patch]]:
    ends = np.cumsum([int(np.prod(shape)) for _, shape in tensors])[:-1]
    parts = zip(tensors, np.split(old, ends), np.split(new, ends), strict=True)
    cut = {name: (a.reshape(shape), b.reshape(shape)) for (name, shape), a, b in parts}
    return {name: a for name, (a, _) in cut.items()}, [codec.diff(name, *pair) for name, pair in cut.items()]


def smollm2(trainer: str = LATE, share: float = 0.01) -> Change:
    """A real update of SmolLM2-135M, at a learning rate that changes `share` of its weights."""
    torch.manual_seed(2)
    weights, last, before = updates.weights(), updates.last(), updates.before_last()
    step = STEPS[trainer]
    lr = replay.rate_for(share, step, _thinned(weights), Update(_thinned(last), _thinned(before)))
    old, patches = {}, []
    for name in weights:
        update = Update(last[name].view(-1), before[name].view(-1))
        pair = step(weights[name].view(-1), update, lr)
        old[name], patch = replay.difference(name, tuple(weights[name].shape), [pair])
        patches.append(patch)
    return Change("SmolLM2-135M", trainer, lr, old, patches)


def qwen(trainer: str = LATE, share: float = 0.01, shapes: Shapes | None = None) -> Change:
    """Weights N(0, 0.02) in the shapes of Qwen3-0.6B, updates drawn from real ones; `share` of it changes."""
    torch.manual_seed(3)
    pool, step = _pool(), STEPS[trainer]
    lr = replay.rate_for(share, step, *_drawn(pool, 4 * CHUNK))
    old, patches = {}, []
    for name, shape in (shapes or qwen_shapes()).items():
        numel = math.prod(shape)
        sizes = [CHUNK] * (numel // CHUNK) + [numel % CHUNK]
        old[name], patch = replay.difference(name, shape, [step(*_drawn(pool, size), lr) for size in sizes])
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
