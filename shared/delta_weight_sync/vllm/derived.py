"""What vLLM makes of the weights after loading them, where no delta would reach it; such a model is refused.

A loader's copies are known (`loader_trace`). What comes after it is not: kernels reorder the experts of a
mixture, attention keeps its sinks in float32, a quantiser packs. No tensor says where its numbers come from,
but one that was there before any weight was read, and still has the bits that it had then, holds no weight.
So vLLM's loader is watched: what a model held before, and which parameters have other bits after the steps
that vLLM takes behind loading.

Patches `model_loader/base_loader.py` of vLLM 0.32, through which all of its loaders go that read checkpoints.
Of a model that was not watched nothing is believed.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from delta_weight_sync.vllm.geometry import storage_of

# What holds no weights although it is made, or written, after loading: the attribute, and what is in it.
_NO_WEIGHTS = {
    "kv_cache": "keys, values and states of requests; a commit leaves them on purpose",
    "cos_sin_cache": "positions, which are cast when the first queries come",
    "_k_scale_cpu": "1.0, of a cache that is not quantised",
    "_v_scale_cpu": "1.0, as above",
}
_DEPTH = 4  # module.quant_method.moe_kernel.fused_experts.tensor
_OPAQUE = (torch.nn.Module, torch.Tensor, type, ModuleType, FunctionType, str, bytes, int, float)
_COMPILERS = ("torch", "vllm.compilation")  # they keep inputs and outputs of captured graphs

Bits = tuple[torch.Size, int]
"""Shape and digest of a tensor."""


@dataclass
class _Watched:
    """A model as it was before loading: path -> the tensor, which keeps its memory, and its bits."""

    before: dict[str, tuple[torch.Tensor, Bits]] = field(default_factory=dict)
    changed: str = ""  # a parameter that has other bits after the steps behind loading


_watched: WeakKeyDictionary[torch.nn.Module, _Watched] = WeakKeyDictionary()


def install() -> None:
    """Watch the loaders of this process, once. Raises `RuntimeError` if they are not those we know."""
    from vllm.model_executor.model_loader import base_loader

    build, finish = base_loader.initialize_model, base_loader.process_weights_after_loading
    if build.__module__ == __name__:
        return
    if list(inspect.signature(finish).parameters) != ["model", "model_config", "target_device"]:
        raise RuntimeError("vLLM's process_weights_after_loading is not that of 0.32; install vLLM 0.32")
    base_loader.initialize_model = watched_while_built(build)
    base_loader.process_weights_after_loading = watched_while_finished(finish)


def watched_while_built(build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """`build`, which returns a model without weights, and after it a look at what the model holds."""

    @functools.wraps(build, assigned=())
    def initialize_model(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = build(*args, **kwargs)
        parameters = {storage_of(parameter) for parameter in model.parameters()}
        held = ((path, t) for path, t in floating(model) if storage_of(t) not in parameters)
        _watched[model] = _Watched({path: (tensor, _bits(tensor)) for path, tensor in held})
        return model

    return initialize_model


def watched_while_finished(finish: Callable[..., None]) -> Callable[..., None]:
    """`finish`, which may change what was loaded, and a look at the parameters before and after it."""

    @functools.wraps(finish, assigned=())
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = _parameters(model)
        finish(model, *args, **kwargs)
        after = _parameters(model)
        changed = next((name for name, bits in before.items() if after.get(name) != bits), "")
        _watched.setdefault(model, _Watched()).changed = changed

    return process_weights_after_loading


def stale(model: torch.nn.Module, filled: set[int]) -> str:
    """Why deltas would leave something of this model behind: a sentence, empty if they would not.

    `filled`: storages that loading fills; parameters must be among them (see `Recorder.check_reach`).
    """
    watched = _watched.get(model, _Watched())
    if watched.changed:
        return (
            f"{watched.changed}: vLLM changes it after loading, so that deltas would not fit; start vLLM "
            "without quantization, a mixture of experts with --moe-backend triton, MLA on a CPU with "
            "--attention-backend CPU_MLA"
        )
    known = filled | {storage_of(parameter) for parameter in model.parameters()}
    for path, tensor in floating(model):
        if storage_of(tensor) not in known and not _holds_no_weight(path, tensor, watched):
            return (
                f"{path}: vLLM keeps it beside the parameters and may have made it from them, so that deltas "
                "would not reach it; try another --attention-backend, or serve another model"
            )
    return ""


def _holds_no_weight(path: str, tensor: torch.Tensor, watched: _Watched) -> bool:
    if not _NO_WEIGHTS.keys().isdisjoint(path.split(".")):
        return True
    then, bits = watched.before.get(path, (None, None))
    return then is not None and storage_of(then) == storage_of(tensor) and _bits(tensor) == bits


def floating(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of all floating-point numbers that a model holds.

    Its parameters, its buffers, and what its modules keep in other attributes: in plain objects, lists and
    dictionaries there, `_DEPTH` of them deep.
    """
    queue = deque((path, vars(module), 0) for path, module in model.named_modules())
    met: set[int] = set()  # breadth first: what is met is met by its shortest way
    while queue:
        path, holder, depth = queue.popleft()
        for key, value in _inside(holder):
            name = path if key in ("_parameters", "_buffers") else f"{path}.{key}".lstrip(".")
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                yield name, value
            elif depth < _DEPTH and id(value) not in met and not _opaque(value):
                met.add(id(value))
                queue.append((name, value, depth if name == path else depth + 1))


def _opaque(value: Any) -> bool:
    return isinstance(value, _OPAQUE) or type(value).__module__.startswith(_COMPILERS)


def _inside(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, dict):
        return iter([(str(key), value) for key, value in holder.items()])
    if isinstance(holder, list | tuple):
        return ((str(number), value) for number, value in enumerate(holder))
    return iter(list(getattr(holder, "__dict__", {}).items()))


def _parameters(model: torch.nn.Module) -> dict[str, Bits]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: _bits(parameter) for name, parameter in named if parameter.is_floating_point()}


def _bits(tensor: torch.Tensor) -> Bits:
    # Not before a model is there: at its start vLLM replaces kernels in all modules, and stumbles over numba.
    from delta_weight_sync.digest_torch import tensor_digest

    flat = tensor.detach().reshape(-1).contiguous()
    wide = flat.view(torch.int16) if flat.element_size() > 1 else flat.view(torch.uint8).to(torch.int16)
    return tensor.shape, 0 if flat.is_meta else tensor_digest("", wide)
