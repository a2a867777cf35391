"""What a commit changes, as flat arrays over the whole model: ready to be copied to a device in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.codec import Patch
from delta_weight_sync.codec.patch import join
from delta_weight_sync.vllm.table import Elements, Table, cut, find

Ulps = NDArray[np.int16]
Found = tuple[int, Elements, Ulps]
"""Of a row of the table: numbers of changed elements, int32 [n], strictly increasing, and ulps, int16 [n]."""
_DENSE = 2  # with a change in every so many elements, a piece takes less memory as all of its elements
EXPLICIT = -1


@dataclass(frozen=True)
class Changes:
    """Parts of `ulps`, each of one row of the table.

    `parts`: int64 [p, 4]: row of the table; first change and number of changes in `ulps`; number of the first
    element if the part is of consecutive elements, else EXPLICIT: their numbers are at the same places in
    `element`, int32 [m], m <= n. `ulps`: int16 [n], what is added to the bits, and wraps; 0 leaves one
    as it is.
    """

    parts: NDArray[np.int64]
    element: Elements
    ulps: Ulps

    def blocks(self, size: int) -> NDArray[np.int64]:
        """The parts, cut into such of at most `size` changes."""
        part, offset, count = cut(self.parts[:, 2], size)
        blocks = self.parts[part]
        blocks[:, 1] += offset
        blocks[:, 2] = count
        blocks[:, 3] += np.where(blocks[:, 3] == EXPLICIT, 0, offset)
        return blocks


def collect(found: Iterable[Found], table: Table) -> Changes:
    """All that was found, in one."""
    sparse, dense, elements = [], [], table.elements
    for row, element, ulps in found:
        if _DENSE * element.size > elements[row]:
            dense.append((row, _spread(element, ulps, int(elements[row]))))
        elif element.size:
            sparse.append((row, element, ulps))
    rows = [row for row, *_ in sparse] + [row for row, _ in dense]
    all_ulps = [ulps for *_, ulps in sparse] + [ulps for _, ulps in dense]
    counts = np.array([ulps.size for ulps in all_ulps], np.int64)
    starts = np.where(np.arange(len(rows)) < len(sparse), EXPLICIT, 0)
    parts = np.stack([np.array(rows, np.int64), np.cumsum(counts) - counts, counts, starts], 1)
    return Changes(parts, join([element for _, element, _ in sparse], np.int32), join(all_ulps, np.int16))


def of_patch(patch: Patch, table: Table) -> Iterator[Found]:
    """What a patch changes, row by row."""
    for row in table.of.get(patch.name, ()):
        element, which = find(table.rows[row], patch.index)
        yield row, element, patch.ulps[which].view(np.int16)


def _spread(element: Elements, ulps: Ulps, size: int) -> Ulps:
    every = np.zeros(size, np.int16)
    every[element] = ulps
    return every
