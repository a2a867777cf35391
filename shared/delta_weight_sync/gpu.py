"""GPU code that the publisher and vLLM share: launches, reads, pinned memory, and the factors in `digest`.

`launch` runs a kernel, and `read` fetches its results. Both count their calls for tests, because a sync is
slow if the number of calls grows with the number of tensors. The kernels also run on host tensors, in
Triton's interpreter.
"""

import ctypes
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from delta_weight_sync.digest import INNER

_HOST_ADDRESSES = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_PORTABLE = 1  # a flag: pin the memory for every GPU of this process
_STEP = 8  # a tensor begins at a multiple of 8 elements, because a thread reads 16 bytes at a time
used = Counter[str]()  # "launches" and "waits" of this process so far


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what torch has reserved and does not use; unlimited on the host."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel as `programs` programs. If `programs` is 0, do nothing."""
    if programs:
        used["launches"] += 1
        kernel[(programs,)](*arguments, **constants)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host after all work on the current stream. Counts as one wait for a GPU.

    A tensor on a GPU is copied to pinned memory, which torch keeps for the next read.
    """
    used["waits"] += 1
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def pin(owner: object, bits: dict[str, torch.Tensor], names: Sequence[str], device: torch.device) -> None:
    """Move the int16 tensors `names` of `bits` into one block of host memory, pinned until `owner` is gone.

    A GPU's kernels read the block at its host address. Without a GPU nothing is pinned. Raises `MemoryError`
    if the system cannot pin this much, or if the GPU sees the block at another address (under gVisor or WSL).
    """
    starts = [0, *itertools.accumulate(-(-bits[name].numel() // _STEP) * _STEP for name in names)]
    memory = torch.empty(starts.pop(), dtype=torch.int16)
    if device.type == "cuda" and memory.numel():
        _register(owner, memory)
    # Each pass frees an old tensor, in reverse order of allocation, so that the heap can shrink.
    for name, start in reversed(list(zip(names, starts, strict=True))):
        old = bits[name]
        bits[name] = memory[start : start + old.numel()].view(old.shape).copy_(old)


def _register(owner: object, memory: torch.Tensor) -> None:
    """Pin memory where it is. (Pinned memory that torch allocates may take up to twice the size.)"""
    fix = 'keep the mirror on the GPU with mirror="device"'
    if not _uses_host_addresses():
        where = "at another address than the CPU (as under gVisor or WSL)"
        raise MemoryError(f"this machine's GPU sees pinned host memory {where}; {fix}")
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    except torch.cuda.CudaError as error:
        what = f"{memory.nbytes / 1e9:.1f} GB of host memory for the mirror cannot be pinned ({error})"
        raise MemoryError(f"{what}; give the trainer more memory, or {fix}") from error
    # The finalizer holds `memory` until `owner` is gone. The end of the process frees pinned memory anyway.
    weakref.finalize(owner, lambda: runtime.cudaHostUnregister(memory.data_ptr())).atexit = False


def _uses_host_addresses() -> bool:
    """Whether GPU 0 reads pinned host memory at the address that the CPU uses."""
    answer = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(answer), _HOST_ADDRESSES, 0)
    return bool(answer.value)


@triton.jit
def outer(seed: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Compute `digest.outer`, a factor (uint64), for each element of `seed` (uint64) and `block`."""
    z = (seed + block.to(tl.uint64)) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@functools.cache
def inner(device: torch.device) -> torch.Tensor:
    """Digest factors of positions within a block, on a device: int32 [4096], to be read as uint32."""
    return torch.from_numpy(INNER.view(np.int32).copy()).to(device)
