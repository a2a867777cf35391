"""What several processes of one program do together, in a group of `torch.distributed`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import all_to_all_single


def swap(outgoing: Sequence[Any], sizes: Sequence[int], group: Any) -> Any:
    """Send `outgoing[i]` (a numpy array) to process i of a torch group. Returns the received arrays, joined.

    `sizes[i]` is the length of the array that process i sends to this one. All arrays have the same dtype.
    """
    sent, sent_bytes = np.concatenate(outgoing), [each.nbytes for each in outgoing]
    received, received_bytes = np.empty(sum(sizes), sent.dtype), [size * sent.itemsize for size in sizes]
    target, source = (torch.from_numpy(array.view(np.uint8)) for array in (received, sent))
    all_to_all_single(target, source, received_bytes, sent_bytes, group=group)
    return received
