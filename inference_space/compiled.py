"""Compiles a replica's kernels into numba's cache when its image is built, so containers start faster."""

import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from delta_weight_sync import codec
from delta_weight_sync.vllm.memory import Table, find
from delta_weight_sync.vllm.routes import Geometry, Piece, Route

# SHARES: for each encoding, shares of changed weights. The larger a share, the more modes the encoder tries.
SHAPE = (256, 96)
SHARES = {"fast": (0.01, 0.2, 0.4, 0.9), "small": (0.01,)}

if __name__ == "__main__":  # encode and decode deltas, find and apply their changes
    source = Geometry(0, SHAPE, (SHAPE[1], 1))
    transposed = Geometry(0, SHAPE, (1, SHAPE[0]))
    piece = Piece(torch.zeros(SHAPE[0] * SHAPE[1], dtype=torch.int16), source, transposed)
    table = Table({"w": Route(SHAPE, (piece,))}, {"w": (0,)})
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 1 << 16, SHAPE).astype(np.uint16)}
    with tempfile.TemporaryDirectory() as folder:
        for encoding, share in ((each, share) for each in get_args(codec.Encoding) for share in SHARES[each]):
            moved = (rng.random(SHAPE) < share) * rng.integers(1, 9, SHAPE)
            patch = codec.diff("w", old["w"], (old["w"] + moved).astype(np.uint16))
            data = codec.encode([patch], old.__getitem__, base=0, version=1, encoding=encoding)
            (path := Path(folder, "delta")).write_bytes(data)
            patches = [*codec.Delta(path).patches({"w": SHAPE}, old.__getitem__)]
            codec.merge(patches, [codec.inverse(patch) for patch in patches])
            find([codec.Decoded.of(patches)], [table])
            codec.apply(patches[0], old["w"])
