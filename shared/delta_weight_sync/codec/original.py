"""The layout of the first work on delta sync: `<name>.indices` int32 and `<name>.values` bf16, uncompressed.

For tools that expect it. Values are absolute, so a file of it can be applied twice without harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from delta_weight_sync.codec.modes import Listed, Old
from delta_weight_sync.codec.patch import CodecError, Patch

FORMAT = "delta-weight-sync-original/1"
_MAX_DIMS, _MAX_DIM = 32, 1 << 48
_INDICES, _VALUES = ".indices", ".values"


def save(patches: Sequence[Patch], old: Old, versions: dict[str, str]) -> bytes:
    """The file as bytes; positions beyond 2^31 need int64 indices, and get them."""
    import torch  # seconds, for a layout that few ask for
    from safetensors import torch as safetensors_torch

    tensors: dict[str, torch.Tensor] = {}
    shapes = {}
    for patch in patches:
        narrow = np.int32 if patch.numel < 1 << 31 else np.int64
        new = old(patch.name).reshape(-1)[patch.index] + patch.ulps
        tensors[patch.name + _INDICES] = torch.from_numpy(patch.index.astype(narrow))
        tensors[patch.name + _VALUES] = torch.from_numpy(new).view(torch.bfloat16)
        shapes["shape." + patch.name] = ",".join(map(str, patch.shape))
    return safetensors_torch.save(tensors, {"format": FORMAT, **versions, **shapes})


def table(file: Any) -> list[Listed]:
    """The tensors of an open file."""
    metadata = file.metadata()
    names = [key.removesuffix(_INDICES) for key in file.keys() if key.endswith(_INDICES)]  # noqa: SIM118
    return [_listed(file, name, metadata["shape." + name]) for name in names]


def _listed(file: Any, name: str, shape: str) -> Listed:
    indices, values = (file.get_slice(name + kind) for kind in (_INDICES, _VALUES))
    if indices.get_dtype() not in ("I32", "I64") or values.get_dtype() != "BF16":
        raise CodecError(f"{name}: indices are not int32 or int64, or values not bf16")
    changes = indices.get_shape()
    if values.get_shape() != changes or len(changes) != 1:
        raise CodecError(f"{name} has not one value per index")
    dims = [int(n) for n in shape.split(",", _MAX_DIMS) if n]
    if any(not 0 <= dim <= _MAX_DIM for dim in dims):
        raise CodecError(f"{name} has a shape that no tensor has")
    return Listed(name, tuple(dims), changes[0], 0)


def read(path: Path, listed: Sequence[Listed], old: Old) -> Iterator[Patch]:
    """The patches: what the absolute values change against `old`."""
    import torch

    with safe_open(path, framework="pt") as file:
        for tensor in listed:
            index = file.get_tensor(tensor.name + _INDICES).to(torch.int64).numpy()
            values = file.get_tensor(tensor.name + _VALUES)
            if np.any(index[1:] <= index[:-1]):
                raise CodecError(f"{tensor.name}: indices are not ascending")
            if index.size and not 0 <= index[0] <= index[-1] < tensor.numel:
                raise CodecError(
                    f"{tensor.name}: position {index[-1]} lies outside shape {list(tensor.shape)}"
                )
            ulps = values.view(torch.uint16).numpy() - old(tensor.name).reshape(-1)[index]
            changed = ulps != 0
            yield Patch(tensor.name, tensor.shape, index[changed], ulps[changed])
