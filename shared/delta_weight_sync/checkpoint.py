"""Model weights as bits: ordinary Hugging Face checkpoints in, `{name: uint16 array}` out, and back.

torch takes seconds to import and need not be installed to read bf16, so only other types ask for it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
Bits = NDArray[np.uint16]


def to_bits(tensor: torch.Tensor) -> Bits:
    """The bf16 cast of `tensor` as uint16, same shape, C-contiguous, on the host; never an alias of it."""
    import torch

    cast = tensor.detach().to(torch.bfloat16, copy=True).cpu().contiguous()
    return cast.view(torch.uint16).numpy()


def read_bits(folder: Path) -> Iterator[tuple[str, Bits]]:
    """Yield every tensor of a checkpoint folder, one file and one tensor at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder.name} holds no .safetensors file; is it a Hugging Face checkpoint?")
    for path in files:
        bf16 = map_bits(path)
        with safe_open(path, framework="numpy") as file:
            others = sorted(set(file.keys()) - bf16.keys())
        yield from ((name, bits.copy()) for name, bits in bf16.items())
        if others:
            yield from _cast(path, others)


def map_bits(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Bits]:
    """The bf16 tensors of a `.safetensors` file, as arrays on the file's own pages; needs no torch.

    What is written to them in mode "r+" is in the file at once. Raises `SafetensorError` for another file.
    """
    with safe_open(path, framework="numpy"):  # checks the header: no tensor lies outside of the file
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


def _cast(path: Path, names: Collection[str]) -> Iterator[tuple[str, Bits]]:
    with safe_open(path, framework="pt") as file:
        for name in names:
            yield name, to_bits(file.get_tensor(name))


def write_bits(shapes: Mapping[str, tuple[int, ...]], bits: Callable[[str], Bits], path: Path) -> None:
    """Write a bf16 `.safetensors` file that transformers and vLLM load.

    `bits` gives each tensor of `shapes` when its turn comes, so that no more than one of them is held here.
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
