"""Old bits + new bits -> delta file -> patches; exact for every bf16 bit pattern.

Most changes of an RL step move a weight by one unit in the last place (ULP), and the smaller a weight is, the
likelier it moves. Encoding `fast` codes the distances between changes (1.25 bytes each where 1 % changed);
`small` codes them given the magnitude of the old weight, which the receiver knows (0.88 bytes); `original`
writes them uncompressed (6 bytes). One reader reads all three.
"""

from delta_weight_sync.codec.file import DELTA_FORMAT, MAX_HEADER, Delta, Encoding, chain, encode, header_size
from delta_weight_sync.codec.patch import (
    Bits,
    CodecError,
    Index,
    Patch,
    apply,
    diff,
    diff_flat,
    inverse,
    join,
    merge,
)

__all__ = [
    "DELTA_FORMAT",
    "MAX_HEADER",
    "Bits",
    "CodecError",
    "Delta",
    "Encoding",
    "Index",
    "Patch",
    "apply",
    "chain",
    "diff",
    "diff_flat",
    "encode",
    "header_size",
    "inverse",
    "join",
    "merge",
]
