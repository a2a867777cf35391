"""The delta codec: old bits + new bits -> delta file -> patches; exact for every bf16 bit pattern.

Most changes of an RL step move a weight by one unit in the last place (ULP), and the smaller a weight is, the
likelier it moves. Encoding `fast` stores the distance from each change to the next: 1.25 bytes per change if
1 % of the weights changed. `small` also uses how large the old weights are, which the receiver knows: 0.89
bytes. One reader reads both.
"""

from delta_weight_sync.codec._file import Delta, Encoding, TensorRow, encode, header_size, merged
from delta_weight_sync.codec._patch import (
    ULP_CLASSES,
    Bits,
    Index,
    Patch,
    apply,
    count_ulps,
    diff,
    diff_flat,
    inverse,
    join,
    merge,
)
from delta_weight_sync.codec.groups import Decoded

__all__ = [
    "ULP_CLASSES",
    "Bits",
    "Decoded",
    "Delta",
    "Encoding",
    "Index",
    "Patch",
    "TensorRow",
    "apply",
    "count_ulps",
    "diff",
    "diff_flat",
    "encode",
    "header_size",
    "inverse",
    "join",
    "merge",
    "merged",
]
