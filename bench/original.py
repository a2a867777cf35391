"""The layout of the first work on delta sync (TRL #5417): `<name>.indices` and `<name>.values`, uncompressed.

Indices are row-major positions (int32, or int64 from 2^31 weights on), values the new bf16 weights. `write`
and `read` convert the library's patches; `publish` and `receive` work on tensors as the authors do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.errors import CodecError

Tensors = dict[str, torch.Tensor]
Old = Callable[[str], Bits]
_INDICES = ".indices"
_VALUES = ".values"


def write(patches: Sequence[Patch], old: Old) -> bytes:
    """Encode patches; `old` returns a tensor's bits before the change."""
    tensors: Tensors = {}
    for patch in patches:
        new = old(patch.name).reshape(-1)[patch.index] + patch.ulps
        narrow = np.int32 if patch.numel < 1 << 31 else np.int64
        tensors[patch.name + _INDICES] = torch.from_numpy(patch.index.astype(narrow))
        tensors[patch.name + _VALUES] = torch.from_numpy(new).view(torch.bfloat16)
    return save(tensors)


def read(path: Path, shapes: Mapping[str, tuple[int, ...]], old: Old) -> Iterator[Patch]:
    """Decode a file into patches of tensors of these shapes; raises `CodecError` for impossible positions."""
    with safe_open(path, framework="pt") as file:
        for name in (key.removesuffix(_INDICES) for key in file.keys() if key.endswith(_INDICES)):  # noqa: SIM118
            index = file.get_tensor(name + _INDICES).to(torch.int64).numpy()
            bits = old(name).reshape(-1)
            if np.any(np.diff(index) <= 0) or (index.size and not 0 <= index[0] <= index[-1] < bits.size):
                raise CodecError(f"{path.name}: positions of {name} are not ascending or lie outside of it")
            ulps = file.get_tensor(name + _VALUES).view(torch.uint16).numpy() - bits[index]
            changed = ulps != 0
            yield Patch(name, shapes[name], index[changed], ulps[changed])


@torch.no_grad()
def publish(snapshot: Tensors, live: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Encode what differs from `snapshot` (bf16), which becomes `live` (any float dtype)."""
    tensors: Tensors = {}
    for name, parameter in live:
        new = parameter.detach().to(torch.bfloat16).view(-1)
        old = snapshot[name].view(-1)
        index = (new != old).nonzero().squeeze(-1)
        values = new[index]
        old.index_copy_(0, index, values)
        tensors[name + _INDICES] = index.to(torch.int32)
        tensors[name + _VALUES] = values
    return save(tensors)


@torch.no_grad()
def receive(path: Path, live: Tensors) -> None:
    """Load a file and write it into `live` (bf16)."""
    loaded = load_file(path)
    for name, parameter in live.items():
        index = loaded[name + _INDICES].to(torch.int64)
        parameter.view(-1).index_copy_(0, index, loaded[name + _VALUES])
