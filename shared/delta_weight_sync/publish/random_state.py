"""Where the random numbers of this process go on: python's, numpy's, torch's, and those of its GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_HOST, _DEVICE = "random/torch", "random/device"


def take() -> tuple[dict[str, torch.Tensor], Any]:
    """The states as tensors, and the rest of them as JSON."""
    tensors = {_HOST: torch.random.get_rng_state()}
    if torch.cuda.is_available():
        tensors[_DEVICE] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return tensors, {"python": [version, numbers, gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def put(tensors: dict[str, torch.Tensor], note: Any) -> None:
    """Go on where `take` was called."""
    version, numbers, gauss = note["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = note["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.random.set_rng_state(tensors[_HOST])
    if _DEVICE in tensors:
        torch.cuda.set_rng_state(tensors[_DEVICE])
