"""Imported once, before processes are forked: what trainers and followers need, loaded and compiled.

Nothing here may start a thread, or no process could be forked any more.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

import tests.chaos.followers  # noqa: F401 - and what it imports
from delta_weight_sync import codec
from delta_weight_sync.digest import state_digest
from delta_weight_sync.reader import apply_delta

torch.set_num_threads(1)


def _warm() -> None:
    old = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    new = old.copy()
    new[0, ::7] += 1
    patch = codec.diff("w", old, new)
    data = codec.encode([patch], lambda name: old, base=0, version=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "delta.safetensors")
        path.write_bytes(data)
        apply_delta({"w": old.copy()}, path)
    state_digest({"w": old})


_warm()
