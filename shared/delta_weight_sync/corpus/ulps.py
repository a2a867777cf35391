"""How far changed weights moved, in units of the last place of bf16, counted in a few classes."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import Bits

CLASSES: Final = ("1", "2", "3-4", "5-16", "17-256", "257+")  # ULPs up or down
_STARTS = np.array([2, 3, 5, 17, 257])  # where each but the first begins


def histogram(ulps: Bits) -> NDArray[np.int64]:
    """Changes in each of `CLASSES`; `ulps` as in a `Patch`. A change of sign is in the last one."""
    distance = np.abs(ulps.view(np.int16).astype(np.int32))
    return np.bincount(np.searchsorted(_STARTS, distance, side="right"), minlength=len(CLASSES))
