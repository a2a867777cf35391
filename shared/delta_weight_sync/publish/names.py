"""The checkpoint's names: which tensors of the checkpoint a trainer's parameters are.

transformers 5 stacks experts (`experts.gate_up_proj`) and renames parts of models (`model.language_model`)
when it loads a checkpoint, and reverses this in `save_pretrained`. This module finds out once what the
reversal does, by running it on tensors without memory ("meta" tensors). The result is nearly always
a view of one parameter. So a stack is compared as it lies in memory, and nothing is copied. Any other tensor,
for example a join of two parameters, is computed at each sync by transformers' own code.

The reversal depends on the checkpoint, which may have the new names already. So the conversions are first
applied to the names of the checkpoint, as `from_pretrained` does, and only those that matched are reversed.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from delta_weight_sync.checkpoint import Shapes

_ATEN = torch.ops.aten
# torch.compile, FSDP and activation checkpointing insert these parts into the names of parameters.
_WRAPPER = "_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
_PREFIX = re.compile(rf"^(?:(?:module|{_WRAPPER})\.)+|(?<=\.)(?:{_WRAPPER})\.")
_log = logging.getLogger("delta_weight_sync")


def plain_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile, DDP, FSDP and others add."""
    return _PREFIX.sub("", name)


class View(NamedTuple):
    """A tensor of the checkpoint that is a box of one parameter, perhaps with reordered dimensions.

    Attributes:
        name: The tensor's name in the checkpoint.
        parameter: The parameter's shape.
        shape: The tensor's shape.
        box: First index and end of the box, in each dimension of the parameter.
        dims: The dimension of the parameter that each dimension of the tensor comes from. The box has one
            element in all others.
        strides: The tensor's strides in a contiguous parameter.
        offset: The tensor's first element in a contiguous parameter.
    """

    name: str
    parameter: tuple[int, ...]
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the parameter under another name, or the same."""
        return self.shape == self.parameter and self.dims == tuple(range(len(self.dims)))

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This view of a whole parameter."""
        if parameter.is_contiguous():
            at = parameter.storage_offset() + self.offset
            return parameter.as_strided(self.shape, self.strides, at)
        return self.cut(parameter, self.box)

    def cut(self, held: torch.Tensor, box: Iterable[Sequence[int]]) -> torch.Tensor:
        """Cut `box` out of a part of the parameter; the result has the tensor's dimensions in their order."""
        part = held[tuple(slice(*ends) for ends in box)]
        dropped = [dim for dim in range(part.dim()) if dim not in self.dims]
        return part.permute(*self.dims, *dropped).reshape([part.shape[dim] for dim in self.dims])


class Joined(NamedTuple):
    """Tensors of the checkpoint that are no views: transformers computes them from `sources`, parameters."""

    sources: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """The names of a model's parameters and of the tensors of its checkpoint.

    Attributes:
        views: Parameter -> the tensors that are views of it.
        joined: The tensors that are no views.
        loaded: All tensors that the model loads from the checkpoint.
        tied: Tensors that are tied to another. Maps each to the other.
        head: The tensor that gives the logits, if it has a name of its own.
        buffers: Tensors of the checkpoint that are buffers of the model.
        float32: Tensors of the checkpoint that the model keeps in float32, whatever dtype it is loaded in.
        reverse: The conversions of this model that are to be reversed.
    """

    views: dict[str, tuple[View, ...]] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    loaded: frozenset[str] = frozenset()
    tied: dict[str, str] = field(default_factory=dict)
    head: str = ""
    buffers: frozenset[str] = frozenset()
    float32: frozenset[str] = frozenset()
    reverse: _Reversal | None = None

    def compute(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the tensors of one `Joined` from its whole parameters."""
        return dict(_revert(self.reverse, parameters))


def names_of(model: Any, stored: Shapes) -> Names:
    """Find the checkpoint's names of a transformers model.

    Args:
        model: The model. Its parameters may be on the meta device, or sharded.
        stored: Name -> shape of the checkpoint's tensors; empty for a model without a checkpoint.
    """
    state = model.state_dict(keep_vars=True)
    ties = _ties(model, state)
    probes = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for name, tensor in state.items()
    }
    reverse = _reverse(model, probes, stored)
    with _Origins(probes) as origins:
        found = _revert(reverse, probes)
    views = dict[str, list[View]]()
    sources = dict[tuple[str, ...], list[str]]()
    for name, tensor in found.items():
        if not tensor.numel():
            continue
        parameters = origins.of(tensor)
        view = _view(_as_stored(name, model, stored), probes[parameters[0]], tensor)
        if _storage(probes[parameters[0]]) == _storage(tensor) and view:
            views.setdefault(parameters[0], []).append(view)
        else:
            sources.setdefault(parameters, []).append(name)
    named = {source: [view.name for view in made] for source, made in views.items()}
    tied = {
        named[target][0]: named[source][0]
        for target, source in ties.items()
        if target in named and source in named
    }
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    wide = [name for name in views if any(module in name for module in strict)]
    return Names(
        views={source: tuple(made) for source, made in views.items()},
        joined=tuple(Joined(parameters, tuple(names)) for parameters, names in sources.items()),
        loaded=frozenset(chain(*named.values(), *sources.values())) - tied.keys(),
        tied=tied,
        head=next(iter(named.get(_head(model, state, ties), ())), ""),
        buffers=frozenset(name for source in views.keys() - trained for name in named[source]),
        float32=frozenset(name for source in wide for name in named[source]),
        reverse=reverse,
    )


def find_names(source: Any, stored: Shapes) -> Names:
    """Find the checkpoint's names of a live model, or of the models that a checkpoint may be loaded as.

    Of two models that have a parameter of the same name, the first counts.

    Args:
        source: The model, or the checkpoint's folder.
        stored: As for `names_of`.
    """
    if not isinstance(source, Path):
        return names_of(source, stored)
    found = [names_of(model, stored) for model in models_of(source)] or [Names()]
    views = {name: made for names in reversed(found) for name, made in names.views.items()}
    return replace(found[0], views=views)


def models_of(folder: Path) -> Iterator[Any]:
    """Yield models without memory that `from_pretrained` of a checkpoint may make, the likeliest first.

    A checkpoint of a model that sees may also be loaded as its text model alone.
    """
    try:
        import transformers
    except ImportError:
        _log.warning(
            "transformers is not installed, so a parameter must have the name that its tensor has in the"
            " checkpoint; to lift this, install delta-weight-sync[trl]"
        )
        return
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - of a model that transformers does not know; or it is damaged
        _log.debug("transformers cannot read the config: %s", error)
        return
    automatic = transformers.AutoModelForCausalLM
    kinds = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    makers = [kind for kind in kinds if kind] + [automatic.from_config]
    met = set[tuple[type, type]]()
    for make, given in [
        *((make, config) for make in makers),
        (automatic.from_config, config.get_text_config()),
    ]:
        try:
            with torch.device("meta"):
                model = make(given)
        except Exception as error:  # noqa: BLE001 - a class may refuse a config in any way
            _log.debug("no model of this config: %s", error)
            continue
        if (kind := (type(model), type(model.config))) not in met:
            met.add(kind)
            yield model


def _ties(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names whose tensor has another name, too: {name: the other}. Without memory, the class says it."""
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if any(tensor.is_meta for tensor in state.values()):
        return ties
    ties = {name: source for name, source in ties.items() if state.get(name) is state.get(source)}
    first: dict[int, str] = {}
    for name, tensor in state.items():
        if name not in ties and first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ties


def _head(model: Any, state: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> str:
    """The name of the parameter that gives the logits; "" if there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = [name for name, tensor in state.items() if tensor is getattr(head, "weight", None)]
    return next(iter([name for name in names if name in ties] or names), "")


@dataclass(frozen=True)
class _Reversal:
    """Stands for a model in transformers' `revert_weight_conversion`, which reads these attributes."""

    _weight_conversions: list[Any]
    config: Any
    shapes: Shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint, without memory. Some models take a stack as it is or transposed, and
        look here for the shape that their checkpoint has."""
        return torch.empty(self.shapes[name], device="meta")


def _reverse(model: Any, probes: Mapping[str, torch.Tensor], stored: Shapes) -> _Reversal | None:
    """Return the conversions of this model that are to be reversed; None if there are none.

    `save_pretrained` calls these functions, and PEFT relies on them. Releases of transformers that lack them
    are taken to rename nothing: what they do rename is then refused, as a name that the checkpoint lacks.
    """
    if not hasattr(model, "base_model_prefix"):  # not a model of transformers
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError as error:
        _log.warning("this release of transformers does not say how it renames tensors: %s", error)
        return None
    used = get_model_conversion_mapping(model, add_legacy=bool(stored))
    if stored:
        renamings = [each for each in used if isinstance(each, WeightRenaming)]
        converters = [each for each in used if isinstance(each, WeightConverter)]
        state = dict(probes)
        for name in sorted(stored):  # each conversion notes whether it matched
            rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        used = [each for each in used if each.was_used()]
    shapes = {name: tuple(probe.shape) for name, probe in probes.items()} | dict(stored)
    return _Reversal(used, model.config, shapes) if used else None


def _revert(reverse: _Reversal | None, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if reverse is None:
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        found: Mapping[str, torch.Tensor] = revert_weight_conversion(reverse, dict(tensors))
        return found


def _as_stored(name: str, model: Any, stored: Shapes) -> str:
    """A tensor's name in `stored`, which may lack the model's prefix, or have one that the model lacks."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if name in stored or prefix == ".":
        return name
    others = name.removeprefix(prefix), prefix + name
    return next((other for other in others if other in stored), name)


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which probes each tensor was made from. A copy counts as the tensor that was copied."""

    def __init__(self, probes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[str, ...]] = {_storage(probe): (name,) for name, probe in probes.items()}
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that no id is used twice

    def of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The names of the probes that a tensor was made from."""
        return self._made[_storage(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_ATEN.clone.default, _ATEN._to_copy.default):
            return args[0]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        names = tuple(dict.fromkeys(name for each in inputs for name in self._made.get(_storage(each), ())))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor):
                self._made.setdefault(_storage(made), names)
                self._kept.append(made)
        return result


def _storage(tensor: torch.Tensor) -> int:
    """An id of a tensor's storage, equal for all its views."""
    return int(tensor.untyped_storage()._cdata)


def _view(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> View | None:
    """Describe `tensor`, a view of the contiguous `parameter`. None if it is no box of the parameter."""
    offset = int(tensor.storage_offset())
    box = list[tuple[int, int]]()
    dims = list[int]()
    for stride in parameter.stride():
        box.append((offset // stride, offset // stride + 1) if stride else (0, 1))
        offset -= box[-1][0] * stride
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        free = [dim for dim in range(parameter.dim()) if dim not in dims]
        same = [
            dim for dim in free if parameter.stride(dim) == stride and (size > 1 or parameter.shape[dim] == 1)
        ]
        chosen = next(iter(same or (free if size == 1 else ())), None)
        if chosen is None or box[chosen][0] + size > parameter.shape[chosen]:
            return None
        dims.append(chosen)
        box[chosen] = box[chosen][0], box[chosen][0] + size
    if math.prod(end - start for start, end in box) != tensor.numel():
        return None
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    return View(
        name, tuple(parameter.shape), shape, tuple(box), tuple(dims), strides, int(tensor.storage_offset())
    )
