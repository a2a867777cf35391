"""Writes a `.safetensors` file tensor by tensor, without a copy, while other threads run."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def storable(tensor: torch.Tensor) -> bool:
    """Whether `write_tensors` supports the dtype."""
    return tensor.dtype in _NAMES


def write_tensors(tensors: Mapping[str, torch.Tensor], note: str, path: Path) -> str:
    """Write contiguous tensors on the host, and `note` in the header under "note"; returns the sha256."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all aligned
    header: dict[str, object] = {"__metadata__": {"note": note}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        offsets = [start, end]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    table = json.dumps(header).encode()
    table += b" " * (-len(table) % 8)
    sha256 = hashlib.sha256()
    blocks: list[bytes | memoryview] = [struct.pack("<Q", len(table)) + table]
    blocks += [_bytes(tensors[name]) for name in order]
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
            sha256.update(block)
    return sha256.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(
        tensor.numel(), 1
    )  # two dimensions, so that an empty tensor has a view as bytes, too
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data
