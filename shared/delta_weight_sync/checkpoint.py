"""Reads Hugging Face checkpoints as bf16 bits, `{name: uint16 array}`, and writes bits as checkpoints.

Only live tensors need torch, which takes seconds to import; files do not.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from delta_weight_sync.errors import CheckpointError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
Bits = NDArray[np.uint16]
_CHUNK = 1 << 18  # elements cast at a time; the scratch space stays in the cache


def to_bits(tensor: torch.Tensor) -> Bits:
    """Cast `tensor` to bf16 and copy it: uint16 bits of the same shape, C-contiguous, on the host."""
    import torch

    cast = tensor.detach().to(torch.bfloat16, copy=True).cpu().contiguous()
    return cast.view(torch.uint16).numpy()


def read_bits(folder: Path) -> Iterator[tuple[str, Bits]]:
    """Yield (name, bf16 bits) of every tensor of a checkpoint folder. Raises `CheckpointError`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder.name} has no .safetensors file: name a Hugging Face checkpoint")
    for path in files:
        yield from read_tensors(path, shapes_in(path))


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a `.safetensors` file. Reads only the header."""
    with safe_open(path, framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Bits]]:
    """Yield (name, bf16 bits) of tensors of a `.safetensors` file, each in its shape.

    Raises `CheckpointError` for a dtype that numpy does not have, for example in a quantized checkpoint.
    """
    bf16 = map_bits(path)
    with safe_open(path, framework="numpy") as file:
        for name in names:
            try:
                yield name, bf16[name].copy() if name in bf16 else to_nearest(file.get_tensor(name))
            except (TypeError, AttributeError) as error:
                raise CheckpointError(f"{name} in {path.name} cannot be cast to bfloat16: {error}") from error


def to_nearest(values: NDArray[Any]) -> Bits:
    """Round `values` to bf16 as torch does (to nearest, ties to even); returns uint16 bits of the same shape.

    Every NaN becomes 0x7fc0. (torch's result for a NaN depends on the machine: 0x7fc0 or 0xffff.)
    """
    flat = values.reshape(-1)
    bits = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _CHUNK):
        with np.errstate(over="ignore", invalid="ignore"):
            part = flat[start : start + _CHUNK].astype(np.float32)
        word = part.view(np.uint32)
        rounded = (word + (0x7FFF + (word >> 16 & 1))) >> 16
        bits[start : start + part.size] = np.where(np.isnan(part), 0x7FC0, rounded)
    return bits.reshape(values.shape)


def map_bits(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Bits]:
    """Map the bf16 tensors of a `.safetensors` file into memory, as uint16 arrays.

    In mode "r+", writing to an array changes the file. Raises `SafetensorError` for any other kind of file.
    """
    with safe_open(path, framework="numpy"):  # checks that every tensor lies inside the file
        pages = np.memmap(path, np.uint8, mode).view(np.ndarray)
    data = 8 + int.from_bytes(pages[:8].tobytes(), "little")
    header = json.loads(pages[8:data].tobytes())
    header.pop("__metadata__", None)
    bits: dict[str, Bits] = {}
    for name, entry in header.items():
        if entry["dtype"] == "BF16":
            start, end = entry["data_offsets"]
            bits[name] = pages[data + start : data + end].view(np.uint16).reshape(entry["shape"])
    return bits


def write_bits(shapes: Mapping[str, tuple[int, ...]], bits: Callable[[str], Bits], path: Path) -> None:
    """Write a bf16 `.safetensors` file that transformers and vLLM load.

    `bits` is called for one tensor of `shapes` after the other, so only one has to be in memory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    table = json.dumps(header).encode()
    table += b" " * (-len(table) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(table)) + table)
        for name in shapes:
            file.write(np.ascontiguousarray(bits(name)).data)
