"""Runs a model's own weight loader on probes and records the copies it makes, without writing anything.

Probes are tensors without memory ("meta" tensors): they cost nothing, whatever their size, and what a loader
computes from one has no values. A dispatch mode sees every operation of the loader's thread. A copy from a
probe into the model's memory is recorded; anything else that a loader does there means: no route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm import derived
from delta_weight_sync.vllm.geometry import Geometry, overlap, part_of, storage_of

_ATEN = torch.ops.aten
_MOVES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FILLS = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)
_EXACT = (torch.bfloat16, torch.float32)  # a bf16 pattern is the upper half of the same number in float32
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)

Names = tuple[str, ...]


class RouteError(DeltaWeightSyncError, RuntimeError):
    """A model that deltas cannot be written into; the message names the tensor or parameter."""


def record(model: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> Recorder:
    """Let the model load a probe for each tensor in `shapes` (checkpoint name -> shape); nothing is written.

    Raises `RouteError` where changes of a tensor could not reach what the model computes with.
    """
    recorder = Recorder(model, shapes)
    try:
        recorder.load(shapes)
    except RouteError:
        raise
    except Exception:  # noqa: BLE001 - a loader may raise anything on a probe
        recorder = _record_without_failing(model, shapes)
    recorder.check_reach()
    return recorder


def _record_without_failing(model: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> Recorder:
    """Find the tensors whose loading fails, each on its own, and load the others together."""
    failures = {name: failure for name, shape in shapes.items() if (failure := _failure(model, name, shape))}
    recorder = Recorder(model, shapes)
    recorder.load([name for name in shapes if name not in failures])
    for name, (reason, touched) in failures.items():
        recorder.excuse(name, reason, touched)
    return recorder


def _failure(model: torch.nn.Module, name: str, shape: Sequence[int]) -> tuple[str, set[int]] | None:
    """Why loading this tensor fails, and the storages of the model that it had in hand until then."""
    recorder = Recorder(model, {name: shape})
    try:
        recorder.load([name])
    except RouteError:
        raise
    except Exception as error:  # noqa: BLE001 - it is the reason
        reason = f"vLLM's loader fails on a probe ({type(error).__name__}: {error})"
        return reason, recorder.touched
    return None


class Recorder(TorchDispatchMode):
    """What a loader does with probes: `copies` (destination, source of the same shape) of each tensor.

    `unroutable` says why some do not arrive by copies alone.
    """

    def __init__(self, model: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._model = model
        self._probes = {
            name: torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta")
            for name, shape in shapes.items()
        }
        self.copies: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in shapes}
        self.unroutable: dict[str, str] = {}
        # Whose bits some memory holds, and what was done to them ("" for a probe).
        self._origin: dict[int, tuple[Names, str]] = {
            storage_of(probe): ((name,), "") for name, probe in self._probes.items()
        }
        self._live = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._placed: dict[int, list[tuple[str, Geometry]]] = {}
        self._reached: set[int] = set()
        self.touched: set[int] = set()  # storages of the model that were written, or that a view was taken of
        self._kept: list[torch.Tensor] = []  # no memory may be freed and used again while it is a key

    def load(self, names: Iterable[str]) -> None:
        """Let the model's loader have these probes."""
        with torch.no_grad(), _parameters_kept(self._model), self:
            self._model.load_weights(iter([(name, self._probes[name]) for name in names]))  # type: ignore[operator]

    def excuse(self, name: str, reason: str, touched: set[int]) -> None:
        """Give up a tensor whose loading fails; what it had in hand will be loaded anew with it."""
        self.unroutable[name] = reason
        self._reached |= touched

    def check_reach(self) -> None:
        """Raise `RouteError` if vLLM computes with anything that loading does not fill.

        Such are parameters that it made from others, and what `derived` finds beside the parameters.
        """
        for name, parameter in self._model.named_parameters():
            if parameter.numel() and storage_of(parameter) not in self._reached:
                raise RouteError(f"{name}: vLLM made it from other parameters, which deltas would not repeat")
        if sentence := derived.stale(self._model, self._reached):
            raise RouteError(sentence)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of the loader."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        names, how = self._origin_of((args, kwargs))
        if any(result.alias_info is not None for result in func._schema.returns):
            self.touched |= self._live & {storage_of(tensor) for tensor in _tensors((args, kwargs))}
        if any(storage_of(tensor) in self._live for tensor in written):
            self._hold_back(func, args, written, names, how)
            return written[0]
        if not names:
            return func(*args, **kwargs)
        if written:
            self._trace(written, names, how or str(func))
            return written[0]
        return self._follow(func, args, kwargs, names, how)

    def _hold_back(self, func: Any, args: Any, written: list[torch.Tensor], names: Names, how: str) -> None:
        """A write into the model's memory."""
        if names or func in _FILLS:
            self._reached.update(storage_of(tensor) for tensor in written)
        if not names:
            self._overwrite(written, "")
        elif func is not _ATEN.copy_.default or how:
            self._refuse(names, f"computes with it ({how or func})")
        elif args[1].dtype != torch.bfloat16 or args[0].dtype not in _EXACT:
            self._refuse(names, f"casts it to {args[0].dtype}")
        elif args[0].numel():
            self._overwrite(written, names[0])
            self._placed.setdefault(storage_of(args[0]), []).append((names[0], part_of(args[0])))
            self.copies[names[0]].append((args[0], args[1].expand(args[0].shape)))

    def _overwrite(self, written: list[torch.Tensor], by: str) -> None:
        """Whatever was copied to the same place before is lost."""
        for tensor in written:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            part = part_of(tensor)
            for name, earlier in self._placed.get(storage_of(tensor), ()):
                if overlap(earlier, part, numel):
                    self._lose(name, by)

    def _lose(self, name: str, by: str) -> None:
        if by and by != name:
            raise RouteError(f"{name} and {by} are one parameter in vLLM; publish only one of them")
        self._refuse((name,), "writes to the same place again")

    def _follow(self, func: Any, args: Any, kwargs: Any, names: Names, how: str) -> Any:
        """An operation on what came from a probe, outside of the model's memory."""
        if func in _MOVES and kwargs.get("dtype") in (None, args[0].dtype, *_EXACT):
            return args[0]  # the same numbers elsewhere
        if func is _ATEN._local_scalar_dense.default:
            self._refuse(names, "reads its values")
            return 0
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        result = _run(func, tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args), kwargs)
        new = [tensor for tensor in _tensors(result) if storage_of(tensor) not in self._origin]
        self._trace(new, names, how or str(func))
        return result

    def _trace(self, tensors: list[torch.Tensor], names: Names, how: str) -> None:
        self._kept += tensors
        self._origin.update((storage_of(tensor), (names, how)) for tensor in tensors)

    def _origin_of(self, values: Any) -> tuple[Names, str]:
        """Whose bits some tensors hold together, and what was done to them."""
        found = [self._origin.get(storage_of(tensor), ((), "")) for tensor in _tensors(values)]
        names = dict.fromkeys(name for names, _ in found for name in names)
        return tuple(names), next((how for _, how in found if how), "")

    def _refuse(self, names: Names, reason: str) -> None:
        for name in names:
            self.unroutable.setdefault(name, f"vLLM's loader {reason}")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if func not in _VIEWS:
            raise
        return func(args[0].contiguous(), *args[1:])  # a view of a copy in another order, which was not made


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes, by its schema."""
    arguments = func._schema.arguments
    values = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([values.get(name) for name in changed])


@contextmanager
def _parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Raise `RouteError` if a parameter was exchanged rather than filled, and put it back."""
    held = [
        (f"{path}.{key}", module, key, parameter, parameter.detach())
        for path, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter is not None
    ]
    exchanged = []
    try:
        yield
    finally:
        for name, module, key, parameter, memory in held:
            if getattr(module, key, None) is not parameter or not parameter.data.is_set_to(memory):  # type: ignore[union-attr]
                exchanged.append(name)
                setattr(module, key, parameter)
                parameter.data = memory
    if exchanged:
        raise RouteError(f"{exchanged[0]}: vLLM's loader exchanges this parameter instead of filling it")
