"""Refuses tensors that have no readable memory, before anything is read.

The comparison hands addresses to compiled code. So each tensor of the trainer must have plain memory, of its
size, on the host or on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from delta_weight_sync.checkpoint import dtype_of
from delta_weight_sync.errors import CodecError

_DEVICES = ("cpu", "cuda")
_UNQUANTIZED = "load the model in bf16, or merge and dequantize it, before you publish"
_passed = set[tuple[type, torch.dtype, torch.layout, torch.device]]()  # kinds of tensors without a fault
_PLAIN = torch.Tensor.__torch_dispatch__  # a subclass that computes by itself has another one


def require_readable(name: str, tensor: Any) -> None:
    """Raise `CodecError`, with the name and the fix, unless a tensor can be compared."""
    if not isinstance(tensor, torch.Tensor):
        raise _error(
            name, f"is a {type(tensor).__name__}, not a tensor", "publish `model.named_parameters()`"
        )
    try:
        _require_plain(name, tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        if hasattr(tensor, "ds_id") and not tensor.numel():
            raise no_elements(name, tensor)
    except CodecError:
        raise
    except Exception as error:  # a tensor of an unusual kind may refuse any question
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = type(tensor).__name__
        raise _error(name, f"is a {kind} that cannot be read ({line})", "publish plain tensors") from error


def no_elements(name: str, tensor: torch.Tensor) -> CodecError:
    """The error for a tensor without elements that should have some, as under DeepSpeed's ZeRO-3."""
    fix = "gather partitioned parameters before you publish (`deepspeed.zero.GatheredParameters`)"
    return _error(name, f"has no elements, shape {list(tensor.shape)}", fix)


def _require_plain(name: str, held: torch.Tensor) -> None:
    """The checks of this rank's part of a tensor."""
    seen = type(held), held.dtype, held.layout, held.device
    if seen not in _passed or held.is_nested:  # a model has thousands of tensors of few kinds
        _require_plain_kind(name, held)
        if held.is_floating_point():  # a packed tensor of integers may look like a plain one
            _passed.add(seen)
    if held.is_neg():
        raise _error(name, "is a lazy view, whose memory has other values", "publish `tensor.resolve_neg()`")
    if held.numel():
        last = held.numel() - 1
        if not held.is_contiguous():
            last = sum((size - 1) * step for size, step in zip(held.shape, held.stride(), strict=True))
        storage = held.untyped_storage()
        end = (held.storage_offset() + last + 1) * held.element_size()
        if storage.data_ptr() == 0 or storage.nbytes() < end:
            fix = "load or gather it before you publish (with FSDP1, in `FSDP.summon_full_params(model)`)"
            raise _error(name, "has no memory: it was freed or moved", fix)


def _require_plain_kind(name: str, held: torch.Tensor) -> None:
    kind = type(held)
    dtype = str(held.dtype).removeprefix("torch.")
    if isinstance(held, UninitializedTensorMixin) or held.is_meta:
        raise _error(name, "is on the meta device, without values", "load the parameter before you publish")
    packed = hasattr(held, "quant_state") or hasattr(held, "SCB") or held.is_quantized
    if packed or hasattr(kind, "__tensor_flatten__"):
        raise _error(name, f"is quantized ({kind.__name__}, {dtype})", _UNQUANTIZED)
    if kind.__torch_dispatch__ is not _PLAIN:
        raise _error(name, f"is a {kind.__name__}, which has no plain memory", "publish plain tensors")
    if held.layout is not torch.strided or held.is_nested:
        layout = "nested" if held.is_nested else str(held.layout).removeprefix("torch.")
        raise _error(name, f"has the layout {layout}", "publish a dense tensor, such as `tensor.to_dense()`")
    if held.dtype.is_complex:
        fix = "publish `torch.view_as_real` of it, under the checkpoint's name"
        raise _error(name, f"is complex ({dtype})", fix)
    if not dtype_of(held):
        raise _error(name, f"is quantized ({dtype})", _UNQUANTIZED)
    if held.device.type not in _DEVICES:
        fix = "publish copies on the host, as in `((name, p.cpu()) for name, p in model.named_parameters())`"
        raise _error(name, f"is on the device {held.device}, which the comparison cannot read", fix)


def _error(name: str, why: str, fix: str) -> CodecError:
    return CodecError(f"parameter {name} {why}: {fix}")
