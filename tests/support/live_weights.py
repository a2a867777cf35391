"""A model's live weights as a replica's worker has them, and deltas for them."""

from pathlib import Path

import numpy as np
import torch

from delta_weight_sync import codec
from delta_weight_sync.vllm.routes import learn, ownership
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks

State = dict[str, np.ndarray]


def live(model: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> LiveWeights:
    learned = learn(model, shapes)
    (owned,), unroutable = ownership(shapes, [learned.sources])
    assert not unroutable
    return LiveWeights(learned.routes, owned, Fallback(model, {}), Ranks(1))


def load(model: torch.nn.Module, state: State) -> torch.nn.Module:
    """Let the model's own loader load copies of the bits; returns the model."""
    tensors = {name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, bits in state.items()}
    model.load_weights(iter(tensors.items()))
    return model


def delta(path: Path, old: State, new: State, encoding: codec.Encoding = "fast", base: int = 0) -> Path:
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    path.write_bytes(codec.encode(patches, old.__getitem__, base=base, version=base + 1, encoding=encoding))
    return path
