"""What others send for the same change: the sizes to compare with (`bench.original` is another).

gap_zstd      distances between changes in 16 bits and the XOR of old and new bits, in planes of bytes through
              zstd (as NeMo-RL and PULSE do, with the better of their choices)
bitmask_zstd  one bit per weight and the same XOR
adapter       the LoRA adapter that TRL 1.16 ships to vLLM instead of weights
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file, save, save_file

from bench.change import Change
from delta_weight_sync.codec import Bits, Index

ZSTD_LEVEL = 3
FAR = 65535
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUERY_VALUE = ("q_proj", "v_proj")  # what PEFT adapts by default for Llama- and Qwen-like models
Tensors = dict[str, torch.Tensor]


def gap_zstd(change: Change) -> int:
    """Bytes of distances and XOR values."""
    gaps = np.concatenate([np.diff(patch.index, prepend=-1) - 1 for patch in change.patches])
    return sum(map(_packed, [*_planes(gap_codes(gaps)), *_planes(_xor(change))]))


def gap_codes(gaps: Index) -> Bits:
    """Distances as 16-bit codes: `FAR` as often as it fits, then the rest."""
    far = gaps // FAR
    codes = np.full(gaps.size + int(far.sum()), FAR, np.uint16)
    codes[np.cumsum(far + 1) - 1] = gaps % FAR
    return codes


def bitmask_zstd(change: Change) -> int:
    """Bytes of bitmask and XOR values."""
    mask = np.zeros(change.elements, np.bool_)
    first = 0
    places = {}
    for name, bits in change.old.items():
        places[name] = first
        first += bits.size
    for patch in change.patches:
        mask[places[patch.name] + patch.index] = True
    return sum(map(_packed, [np.packbits(mask), *_planes(_xor(change))]))


def _xor(change: Change) -> Bits:
    pairs = ((change.old[p.name].reshape(-1)[p.index], change.new_values(p)) for p in change.patches)
    return np.concatenate([old ^ new for old, new in pairs])


def _planes(values: Bits) -> list[NDArray[np.uint8]]:
    return [values.astype(np.uint8), (values >> 8).astype(np.uint8)]


def _packed(content: NDArray[np.uint8]) -> int:
    return len(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content.tobytes()))


def publish_full(live: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write the whole model."""
    save_file({name: parameter.detach().to(torch.bfloat16) for name, parameter in live}, path)


@torch.no_grad()
def receive_full(path: Path, live: Tensors) -> None:
    """Load the whole model and copy it into `live`."""
    for name, tensor in load_file(path).items():
        live[name].copy_(tensor)


def adapter(
    shapes: Mapping[str, Sequence[int]], rank: int, targets: Sequence[str], dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of the adapter's file. PEFT keeps adapters in fp32, also of bf16 models; TRL saves them so."""
    tensors = {}
    for name, shape in shapes.items():
        if any(f".{target}." in name for target in targets):
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(rank, shape[1], dtype=dtype)
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(shape[0], rank, dtype=dtype)
    return len(save(tensors))
