"""What the kernels found, as positions and steps: the host's half of `compare.find`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.digest import BLOCK
from delta_weight_sync.kernel import kernel

COUNTS = 8192  # more than a tile's changes


@kernel
def unpack(
    notes: NDArray[np.int64],
    found: NDArray[np.int32],
    blocks: NDArray[np.int64],
    index: NDArray[np.int64],
    ulps: NDArray[np.uint16],
) -> None:
    """Fill `index` and `ulps` with the changes of all tiles in order.

    `notes`: int64 [tiles], `place * 8192 + count`. `found`: `position within the tile << 16 | ulps`.
    `blocks`: int64 [tiles], their numbers in their tensors.
    """
    at = 0
    for tile in range(notes.size):
        place, count = notes[tile] // COUNTS, notes[tile] % COUNTS
        part = found[place : place + count]
        _unpack_tile(part, blocks[tile] * BLOCK, index[at : at + count], ulps[at : at + count])
        at += count


@kernel
def _unpack_tile(
    found: NDArray[np.int32], first: int, index: NDArray[np.int64], ulps: NDArray[np.uint16]
) -> None:
    """A loop over slices from their start, which the compiler turns into vector instructions."""
    for j in range(found.size):
        index[j] = first + (found[j] >> 16)
        ulps[j] = found[j] & 0xFFFF
