"""What the publisher and vLLM share of their work on a GPU: the digest, packing, reads, pinned memory.

All of it is plain PyTorch, so the same code runs on tensors of the host. Tests run it there, and compare it
with plain loops. A sync is slow if calls grow with the number of tensors. So `pack` copies many tensors in
one call, and the arithmetic is on all changes together, in parts that bound the temporary memory.

CUDA's current device belongs to a thread, and is device 0 in a new thread. So whatever runs on a device does
so in a block of `on`.
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_weight_sync.digest import BLOCK, INNER

_PORTABLE = 1  # a flag: pin the memory for every GPU of this process
CHANGES = 1 << 22  # changes that are computed together, with about ten int64 each


def on(device: torch.device) -> torch.accelerator.device_index:
    """A block in which `device` is the thread's current device. Unlike `torch.cuda.stream` alone, it creates
    no context on device 0."""
    return torch.accelerator.device_index(device.index)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what torch has reserved and does not use; unlimited on the host."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def room(shape: tuple[int, ...], kind: torch.dtype, near: torch.device) -> torch.Tensor:
    """An empty tensor on the host, in pinned memory if `near` is a GPU. Torch keeps the memory for reuse."""
    return torch.empty(shape, dtype=kind, pin_memory=near.type == "cuda")


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device. The host does not wait for the device, as it would with pageable memory."""
    here = torch.from_numpy(array)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def wait(device: torch.device) -> None:
    """Wait for all work on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def read(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors of a device to the host after all work on the current stream, with one wait."""
    copies = [room(tuple(t.shape), t.dtype, device).copy_(t, non_blocking=True) for t in tensors]
    wait(device)
    return copies


def pack(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, fresh: Sequence[bool] = ()
) -> None:
    """Copy each source to its target, which has the same shape; cast it to the target's dtype.

    There is one call per kind of source, because torch then copies hundreds of tensors per launch. `fresh`
    can say of each source whether its memory is contiguous, if the caller knows that.
    """
    kinds: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    dense = fresh or [source.is_contiguous() for source in sources]
    for source, target, contiguous in zip(sources, targets, dense, strict=True):
        if source.numel():
            of_kind = kinds.setdefault((source.dtype, contiguous), ([], []))
            of_kind[0].append(target)
            of_kind[1].append(source)
    for into, these in kinds.values():
        torch._foreach_copy_(into, these, non_blocking=True)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as flat int16. It shares the memory."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.int16, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // 2,))  # type: ignore[call-overload, no-any-return]


def cuts(size: int, most: int) -> Iterator[slice]:
    """Slices of `range(size)`, each with at most `most` items."""
    return (slice(start, min(start + most, size)) for start in range(0, size, most))


def join(bits: dict[str, torch.Tensor], names: Sequence[str], memory: torch.Tensor) -> None:
    """Move the int16 tensors `names` of `bits` into `memory`, flat and of their size altogether."""
    ends = [*itertools.accumulate(bits[name].numel() for name in names)]
    # Each pass frees an old tensor, in reverse order of allocation, so that the heap can shrink.
    for name, end in reversed(list(zip(names, ends, strict=True))):
        old = bits[name]
        bits[name] = memory[end - old.numel() : end].view(old.shape).copy_(old)


def pin(owner: object, memory: torch.Tensor) -> None:
    """Pin memory of the host where it is, until `owner` is gone. (Pinned memory that torch allocates may
    take up to twice the size.) Raises `MemoryError` if the system cannot pin this much."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    except torch.cuda.CudaError as error:
        what = f"{memory.nbytes / 1e9:.1f} GB of host memory for the mirror cannot be pinned ({error})"
        fix = 'give the trainer more memory, or keep the mirror on the GPU with mirror="device"'
        raise MemoryError(f"{what}; {fix}") from error
    # The finalizer holds `memory` until `owner` is gone. The end of the process frees pinned memory anyway.
    weakref.finalize(owner, lambda: runtime.cudaHostUnregister(memory.data_ptr())).atexit = False


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """int16 bits as the unsigned numbers that the digest sums, in int64."""
    return bits.to(torch.int64).bitwise_and_(0xFFFF)


def outer(seed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """`digest.outer` in int64. This wraps as uint64 does, but a shift to the right copies the sign, so the
    copies are cleared."""
    z = (seed + block) * _signed(0x9E3779B97F4A7C15)
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1)).bitwise_or_(1)


def _signed(number: int) -> int:
    return number - (1 << 64)


@functools.cache
def inner(device: torch.device) -> torch.Tensor:
    """Digest factors of positions within a block, on a device: int64 [4096]."""
    return torch.from_numpy(INNER.astype(np.int64)).to(device)


def factors(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The digest's factors of elements, int64 [n]: of the tensors with these seeds, at these positions."""
    within = inner(position.device)[position % BLOCK]
    return outer(seed, position // BLOCK).mul_(within)


def block_sums(bits: torch.Tensor) -> torch.Tensor:
    """int64 [b]: of each block of 4096 words (int16 [b * 4096]), the sum of inner factor times word. Words
    that are 0 add nothing."""
    return (bits.to(torch.int32).bitwise_and_(0xFFFF).view(-1, BLOCK) * inner(bits.device)).sum(1)


def places(
    sizes: torch.Tensor, strides: torch.Tensor, of: torch.Tensor, element: torch.Tensor
) -> torch.Tensor:
    """Distances of elements from the first element of the box that each one lies in.

    Args:
        sizes: int64 [dims, boxes], the outer dimension first.
        strides: int64 [dims, boxes].
        of: int64 [n], the number of each element's box.
        element: int64 [n], its row-major number within the box.
    """
    if len(sizes) == 1:
        return element * strides[0][of]
    at = torch.zeros_like(element)
    for dim in range(len(sizes) - 1, 0, -1):
        size = sizes[dim][of]
        at.add_((element % size).mul_(strides[dim][of]))
        element = element // size
    return at.add_(element * strides[0][of])
