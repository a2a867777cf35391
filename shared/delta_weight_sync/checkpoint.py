"""Model weights as bits: ordinary Hugging Face checkpoints in, `{name: uint16 array}` out, and back.

torch takes seconds to import, so who only looks at a run is spared it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
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
