"""What several processes of one program do together, in a group of `torch.distributed`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import all_to_all_single


def all_to_all(outgoing: Sequence[Any], sizes: Sequence[int], group: Any) -> Any:
    """Send `outgoing[i]` (a numpy array) to process i of a gloo group. Returns the received arrays, joined.

    `sizes[i]` is the length of the array that process i sends to this one. All arrays have the same dtype.
    """
    sent = np.concatenate(outgoing)
    received = np.empty(sum(sizes), sent.dtype)
    all_to_all_single(
        torch.from_numpy(received.view(np.uint8)),
        torch.from_numpy(sent.view(np.uint8)),
        [size * sent.itemsize for size in sizes],
        [each.nbytes for each in outgoing],
        group=group,
    )
    return received
