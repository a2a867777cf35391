"""Host memory that the kernels of a GPU read at its own address."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

_PORTABLE = 1  # for every GPU of this process
_STEP = 8  # elements between two tensors' beginnings: 16 bytes, which a thread reads at once


def pin(owner: object, bits: dict[str, torch.Tensor], names: Sequence[str], device: torch.device) -> None:
    """Move these int16 tensors into one block of host memory, pinned until `owner` is gone.

    Raises `MemoryError` if the system does not pin as much. Without a GPU it is ordinary memory.
    """
    ends = list(itertools.accumulate(-(-bits[name].numel() // _STEP) * _STEP for name in names))
    memory = torch.empty(ends[-1], dtype=torch.int16)
    if device.type == "cuda" and memory.numel():
        _register(memory)
        weakref.finalize(owner, _unregister, memory).atexit = False  # a process that ends frees it anyway
    starts = [0, *ends[:-1]]
    for name, start in reversed(list(zip(names, starts, strict=True))):  # newest first, as a heap shrinks
        old = bits[name]
        bits[name] = memory[start : start + old.numel()].view(old.shape).copy_(old)


def _register(memory: torch.Tensor) -> None:
    """Pin it as it is: torch rounds its own pinned memory up to a power of two, at worst twice the model."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    answer = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    try:
        torch.cuda.check_error(answer)
    except torch.cuda.CudaError as error:
        raise MemoryError(
            f"{memory.nbytes / 1e9:.1f} GB of host memory for the mirror cannot be pinned ({error}); give the"
            ' trainer more memory, or keep the mirror on the GPU with mirror="device"'
        ) from error


def _unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
