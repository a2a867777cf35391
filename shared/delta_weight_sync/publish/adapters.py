"""Models with PEFT's adapters, which are published merged: as plain weights, under the base's names.

A layer's weight in a version is `W + scale * B @ A`, with a sum over the active adapters; DoRA then scales
each output to its magnitude. All of it is computed in float64, one tensor at a time, and rounded once, to the
dtype of the version. In float32, about one weight in 100,000 would be rounded another way. So it would be by
torch's own cast from float64 to bf16, which rounds to float32 first.

`W` is only read. PEFT's `merge_adapter` and `unmerge_adapter` write into it and round each time: in bf16, 100
such pairs changed up to 2.3 % of a base's weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from delta_weight_sync.checkpoint import DTYPES, dtype_of
from delta_weight_sync.errors import ConfigError
from delta_weight_sync.publish.blocks import Block
from delta_weight_sync.publish.names import plain_name
from delta_weight_sync.publish.plan import Plan
from delta_weight_sync.publish.readable import require_readable
from delta_weight_sync.publish.sharding import Weights, held_block, is_block, local

_MERGED_TYPES: Final = ("LORA", "TRAINABLE_TOKENS")
_CLASSES: Final = {
    "peft": ("PeftModel", "PeftMixedModel"),
    "peft.tuners.tuners_utils": ("BaseTunerLayer",),
    "peft.tuners.lora": ("Linear", "Embedding", "ParamWrapper"),
    "peft.tuners.lora.variants": ("DoraLinearVariant", "DoraEmbeddingVariant"),
    "peft.tuners.trainable_tokens": ("TrainableTokensLayer",),
    "peft.utils": ("AuxiliaryTrainingWrapper", "ModulesToSaveWrapper", "TrainableTokensWrapper"),
}
_OTHERWISE: Final = "train an adapter of a plain `LoraConfig`, or all weights"
# Elements that are computed together in float64: on the host, what its caches hold.
_HOST_ELEMENTS: Final = 1 << 18
_DEVICE_ELEMENTS: Final = 1 << 24


class Piece(NamedTuple):
    """A parameter or buffer of the base.

    Attributes:
        name: Its name in the base, without what PEFT adds.
        key: Its name in its own module, such as "weight".
        tensor: The base's tensor.
        layers: PEFT's layers that change it.
        is_tied: Whether an earlier piece is the same tensor.
    """

    name: str
    key: str
    tensor: torch.Tensor
    layers: tuple[Any, ...]
    is_tied: bool = False


class Term(NamedTuple):
    """What one adapter adds to a tensor: `left @ right`, in float64, of the tensor's shape.

    `magnitude` is DoRA's, one number for each index of the tensor's dimension `outputs`.
    """

    left: torch.Tensor
    right: torch.Tensor
    magnitude: torch.Tensor | None = None
    outputs: int = 0


@dataclass(frozen=True)
class Merged:
    """The tensors of a model with adapters. They are merged while they are iterated, and nothing is kept.

    Attributes:
        model: The model with its adapters.
        pieces: The base's tensors.
        whole: Whether to gather sharded tensors. All ranks must then iterate to the end.
    """

    model: torch.nn.Module
    pieces: tuple[Piece, ...]
    whole: bool = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors(None))

    def tensors(self, plan: Plan | None) -> Weights:
        """Yield tensors, rounded to the dtype in which versions of `plan` hold them; by default their own.

        Of tied ones, yield the first, and with a `plan` also the others that its versions have.

        A version may hold 16 bits of a float32 tensor. Such a tensor is yielded in float32, with values that
        the mirror's rounding turns into the rounded exact sum.
        """
        for piece in self.pieces:
            is_buffer = not isinstance(piece.tensor, torch.nn.Parameter)
            if is_buffer and plan and not plan.has(plain_name(piece.name)):
                continue
            if piece.is_tied and (plan is None or plan.lacks_tied(plain_name(piece.name))):
                continue
            tensor = _merge(piece, _wanted(piece, plan)) if piece.layers else piece.tensor
            gathers = self.whole and isinstance(tensor, DTensor)
            yield piece.name, cast(DTensor, tensor).full_tensor() if gathers else tensor

    def trained(self) -> Weights:
        """Yield what a state must hold: adapters, and all else that training may change, as it is."""
        frozen = {id(piece.tensor) for piece in self.pieces if not piece.tensor.requires_grad}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in frozen:
                require_readable(name, parameter)
                yield plain_name(name), parameter
        for piece in self.pieces:
            if not (piece.is_tied or isinstance(piece.tensor, torch.nn.Parameter)):
                yield plain_name(piece.name), piece.tensor


def unwrapped(model: Any) -> Any:
    """The model itself, without what DDP, torch.compile and others wrap around it."""
    while (inner := getattr(model, "module", None) or getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model


def adapted(model: torch.nn.Module, *, whole: bool = False) -> torch.nn.Module | Merged:
    """Return the merged tensors of a model with PEFT's adapters; any other model as it is.

    Raises:
        ConfigError, CodecError: An adapter cannot be merged exactly. The message names the layer and the fix.
    """
    inner = unwrapped(model)
    if not _has_adapters(inner):
        return model
    for name, config in getattr(inner, "peft_config", {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _MERGED_TYPES:
            raise ConfigError(
                f"adapter {name!r} is of PEFT's type {kind}, which no plain weights express exactly:"
                f" {_OTHERWISE}"
            )
    is_wrapper = isinstance(inner, _peft().PeftModel | _peft().PeftMixedModel)
    base = inner.base_model.model if is_wrapper else inner  # transformers adds adapters to its own model
    return Merged(inner, tuple(_tied_alike(_walk(base, "", ()))), whole)


def _has_adapters(model: Any) -> bool:
    """Whether a model has anything of PEFT. Where PEFT was not imported, no model has."""
    names = (
        ("", "PeftModel"),
        (".tuners.tuners_utils", "BaseTunerLayer"),
        (".utils", "AuxiliaryTrainingWrapper"),
    )
    found = [getattr(sys.modules.get(f"peft{module}"), name, None) for module, name in names]
    kinds = tuple(kind for kind in found if kind)
    return bool(kinds) and any(isinstance(part, kinds) for part in model.modules())


@functools.cache
def _peft() -> SimpleNamespace:
    """The classes of PEFT by name. Raises `ConfigError` if this release lacks one."""
    found = SimpleNamespace()
    for module, names in _CLASSES.items():
        for name in names:
            try:
                setattr(found, name, getattr(importlib.import_module(module), name))
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"this release of PEFT has no {name} in {module}, with which adapters are merged:"
                    " pip install 'peft>=0.21'"
                ) from error
    return found


@contextlib.contextmanager
def kept_apart(model: Any) -> Iterator[None]:
    """For a `with` body in which `merge_adapter` and `unmerge_adapter` of a PEFT model do nothing."""
    found = ("merge_adapter", "unmerge_adapter") if _has_adapters(model) else ()
    names = [name for name in found if hasattr(model, name)]
    for name in names:
        setattr(model, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def _walk(module: Any, path: str, layers: tuple[Any, ...]) -> Iterator[Piece]:
    """Yield the base's tensors in a module, as the active adapters use them. `layers`: those around it."""
    peft = _peft()
    if isinstance(module, peft.AuxiliaryTrainingWrapper):
        yield from _walk(_chosen(module, path), path, layers)
        return
    if isinstance(module, peft.BaseTunerLayer):
        _require_exact(module, path)
        yield from _walk(module.base_layer, path, (*layers, module))
        return
    for key, parameter in module._parameters.items():
        if parameter is not None:
            changing = tuple(layer for layer in layers if _changes(layer, key))
            yield Piece(_joined(path, key), key, parameter, changing)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield Piece(_joined(path, key), key, buffer, ())
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _joined(path, key), ())


def _tied_alike(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Mark tied pieces. Raises `ConfigError` if the adapters change two that are tied differently."""
    first = dict[int, Piece]()
    for piece in pieces:
        other = first.setdefault(id(piece.tensor), piece)
        yield piece._replace(is_tied=other is not piece)
        if other is not piece and (piece.layers or other.layers):
            both = [
                _whole(_merge(each, None)) if each.layers else _whole(each.tensor) for each in (piece, other)
            ]
            if not torch.equal(*both):
                raise ConfigError(
                    f"{plain_name(piece.name)} and {plain_name(other.name)} are one tensor, but the adapter"
                    " does not change both alike: set ensure_weight_tying=True in the LoraConfig, or adapt"
                    " neither of them, or untie them, save that model, and give its folder as base"
                )


def _chosen(wrapper: Any, path: str) -> Any:
    """What a module is replaced by under `modules_to_save` and `trainable_token_indices`."""
    _require_enabled(wrapper, path)
    if isinstance(wrapper, _peft().TrainableTokensWrapper):
        return wrapper.token_adapter
    if not isinstance(wrapper, _peft().ModulesToSaveWrapper):
        raise _inexact(path, f"is wrapped in PEFT's {type(wrapper).__name__}")
    active = wrapper.active_adapters
    saved = wrapper.modules_to_save
    # As in PEFT's forward pass: the copy counts only if every active adapter has one.
    used = bool(active) and all(adapter in saved for adapter in active)
    return saved[active[0]] if used else wrapper.original_module


def _require_enabled(layer: Any, path: str) -> None:
    if layer.disable_adapters:
        raise ConfigError(
            f"the adapters of {plain_name(path)} are disabled: publish outside of"
            " `with model.disable_adapter()`, or call `model.enable_adapter_layers()` first"
        )


def _require_exact(layer: Any, path: str) -> None:
    """Raise `ConfigError` or `CodecError` unless a layer's active adapters can be merged with its base."""
    peft = _peft()
    _require_enabled(layer, path)
    base = layer.get_base_layer()
    for key, parameter in base._parameters.items():
        if parameter is not None:
            require_readable(plain_name(_joined(path, key)), parameter)
    if layer.merged:
        raise ConfigError(
            f"adapter {layer.merged_adapters[0]!r} is merged into {plain_name(path)}: call"
            " `model.unmerge_adapter()`, and publish the model as it is, because publishing merges by itself"
        )
    kind = type(layer)
    if issubclass(kind, FSDPModule):  # `fully_shard` put a class of its own before the layer's
        kind = kind.__bases__[-1]
    if kind not in (peft.Linear, peft.Embedding, peft.ParamWrapper, peft.TrainableTokensLayer):
        raise _inexact(path, f"is adapted by PEFT's {kind.__module__}.{kind.__name__}")
    if isinstance(layer.base_layer, peft.BaseTunerLayer) and not (
        hasattr(layer, "parameter_name") and hasattr(layer.base_layer, "parameter_name")
    ):
        raise _inexact(path, "is adapted by one layer of PEFT around another")
    changed = [getattr(layer, "parameter_name", "weight")]
    active = _active(layer)
    if kind is peft.TrainableTokensLayer:
        rows = [row for adapter in active for row in layer.token_indices[adapter]]
        if len(rows) != len(set(rows)):
            raise ConfigError(
                f"two active adapters train the same token of {plain_name(path)}: activate one of them"
            )
    else:
        variants = [type(layer.lora_variant[name]) for name in active if name in layer.lora_variant]
        for variant in variants:
            if variant not in (peft.DoraLinearVariant, peft.DoraEmbeddingVariant):
                raise _inexact(path, f"is adapted by PEFT's {variant.__name__}")
        if variants and len(active) > 1:
            raise ConfigError(
                f"{plain_name(path)} has several active adapters, and one of them is DoRA, whose magnitudes"
                " count for one adapter only: activate one with `model.set_adapter(name)`"
            )
        changed += ["bias"] if any(layer.lora_bias.get(adapter) for adapter in active) else []
    for key in changed if active else []:
        tensor = base._parameters.get(key)
        if tensor is None or dtype_of(tensor) not in ("BF16", "F16", "F32", "F64"):
            what = "no plain parameter" if tensor is None else f"in {dtype_of(tensor)}"
            raise ConfigError(
                f"{plain_name(_joined(path, key))} is {what}, so an adapter cannot be added to it: load the"
                " base in bf16, and without `lora_bias` where a layer has no bias"
            )


def _inexact(path: str, why: str) -> ConfigError:
    return ConfigError(f"{plain_name(path)} {why}, which cannot be merged exactly: {_OTHERWISE}")


def _active(layer: Any) -> list[str]:
    """The active adapters that a layer has, in PEFT's order."""
    if hasattr(layer, "token_indices"):
        return [name for name in layer.active_adapters if name in layer.token_indices]
    own = {*layer.lora_A.keys(), *layer.lora_embedding_A.keys()}
    return [name for name in layer.active_adapters if name in own]


def _changes(layer: Any, key: str) -> bool:
    """Whether a layer's active adapters change a parameter of its base."""
    active = _active(layer)
    if key == "bias" and not hasattr(layer, "token_indices"):
        return any(layer.lora_bias.get(adapter) for adapter in active)
    return bool(active) and key == getattr(layer, "parameter_name", "weight")


@torch.no_grad()
def _merge(piece: Piece, wanted: str | None) -> torch.Tensor:
    """Return a tensor with its adapters. `wanted`: the dtype in which versions hold it, if it is known."""
    if hasattr(piece.layers[0], "token_indices"):
        return _with_tokens(piece)
    terms = [_term(piece, layer, adapter) for layer in piece.layers for adapter in _active(layer)]
    given = piece.tensor
    if isinstance(given, DTensor) and (not is_block(given) or any(t.magnitude is not None for t in terms)):
        given = given.full_tensor()  # DoRA's norm needs whole rows
    own = dtype_of(given)
    wanted = wanted or own
    is_wide = wanted in ("F32", "F64")
    kind = getattr(torch, DTYPES[wanted if is_wide or wanted == own else "F32"][0])
    held = local(given)
    block = held_block(given)
    merged = torch.empty(held.shape, dtype=kind, device=held.device)
    stack = _matrices(held)
    result = _matrices(merged)
    for number in range(len(stack)):
        parts = [_part(term, block, number) for term in terms]
        for rows in _slices(stack[number], whole=terms[0].magnitude is not None):
            exact = stack[number, rows].to(torch.float64, copy=True)
            for left, right in parts:
                exact.addmm_(left[rows], right)
            if (magnitude := terms[0].magnitude) is not None:
                norm = torch.linalg.vector_norm(exact, dim=1 - terms[0].outputs, keepdim=True)
                exact *= magnitude.reshape(norm.shape) / norm
            result[number, rows] = exact if is_wide else _odd(exact)
    if not isinstance(given, DTensor):
        return merged
    return DTensor.from_local(
        merged,
        given.device_mesh,
        given.placements,
        run_check=False,
        shape=given.shape,
        stride=given.stride(),
    )


def _odd(exact: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 such that a second rounding, to 16 bits, gives the exact value's rounding.

    A value between two float32 becomes the one whose last bit is 1, which is never halfway between two values
    of 16 bits (Boldo and Melquiond, 2005).
    """
    nearest = exact.float()
    error = exact - nearest
    bits = nearest.view(torch.int32)
    bits -= (error * nearest < 0).int()  # it was rounded away from zero
    bits |= (error.abs() > 0).int()  # false of NaN, which an infinite value leaves
    return nearest


def _term(piece: Piece, layer: Any, adapter: str) -> Term:
    """What one of a layer's adapters adds to a tensor of its base."""

    def read(tensor: torch.Tensor) -> torch.Tensor:
        require_readable(f"{plain_name(piece.name)}'s adapter", tensor)
        return _whole(tensor.detach()).to(piece.tensor.device, torch.float64)

    scale = float(layer.scaling[adapter])
    if piece.key == "bias" and not hasattr(layer, "parameter_name"):
        bias = read(layer.lora_B[adapter].bias)
        return Term(scale * bias[:, None], torch.ones_like(bias[:1, None]))
    if adapter in layer.lora_embedding_A:
        first = read(layer.lora_embedding_A[adapter])
        second = read(layer.lora_embedding_B[adapter])
        flipped = True
    else:
        first = read(layer.lora_A[adapter].weight)
        second = read(layer.lora_B[adapter].weight)
        flipped = bool(layer.fan_in_fan_out)
    if piece.tensor.dim() == 3:
        experts = len(piece.tensor)
        first = first.reshape(experts, -1, first.shape[-1])
        second = second.reshape(len(second), -1, experts).permute(2, 0, 1)
        # Whether a stack holds [in, out] matrices. PEFT has no public name for this.
        flipped = not getattr(layer, "_did_swap_in_out_features", False)
    left = first.mT if flipped else second
    right = second.mT if flipped else first
    magnitude = None
    if adapter in layer.lora_magnitude_vector:
        magnitude = read(layer.lora_magnitude_vector[adapter].weight)
    if (found := (*left.shape[:-1], right.shape[-1])) != tuple(piece.tensor.shape):
        raise ConfigError(
            f"{plain_name(piece.name)} has shape {tuple(piece.tensor.shape)}, but adapter {adapter!r} adds"
            f" {found}: publish from a model that is not split by tensor parallelism"
        )
    return Term(scale * left, right, magnitude, outputs=1 if flipped else 0)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a stack of matrices."""
    return tensor[None] if tensor.dim() == 2 else tensor[None, :, None] if tensor.dim() == 1 else tensor


def _part(term: Term, block: Block, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A term's factors for matrix `number` of a block."""
    left = term.left
    right = term.right
    at = [slice(start, start + size) for start, size in zip(block.offset, block.extent, strict=True)]
    if left.dim() == 3:
        number += at.pop(0).start
        left = left[number]
        right = right[number]
    columns = at[1] if len(at) > 1 else slice(None)
    return left[at[0]], right[:, columns]


def _slices(matrix: torch.Tensor, *, whole: bool) -> list[slice]:
    """The rows of a matrix that are computed together."""
    elements = _DEVICE_ELEMENTS if matrix.is_cuda else _HOST_ELEMENTS
    step = len(matrix) if whole else max(1, elements // max(1, matrix.shape[1]))
    return [slice(first, first + step) for first in range(0, len(matrix), step or 1)]


def _with_tokens(piece: Piece) -> torch.Tensor:
    """Return an embedding with the rows that were trained, in its own dtype, as PEFT uses them."""
    merged = _whole(piece.tensor.detach()).clone()
    for layer in piece.layers:
        for adapter in _active(layer):
            rows = torch.tensor(layer.token_indices[adapter], device=merged.device)
            merged[rows] = _whole(layer.trainable_tokens_delta[adapter].detach()).to(merged)
    return merged


def _wanted(piece: Piece, plan: Plan | None) -> str | None:
    """The dtype in which versions hold a tensor; None if it is unknown."""
    if plan is None:
        return None
    name = plain_name(piece.name)
    if joined := plan.joined(name):
        trained = dtype_of(piece.tensor)
        found = {plan.target(each, trained, ()).dtype for each in joined.names}
    else:
        found = {target.dtype for target in plan.targets(name, piece.tensor)}
    return found.pop() if len(found) == 1 else None


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
