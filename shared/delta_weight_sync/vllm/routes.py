"""Routes: where each checkpoint tensor is in vLLM's parameters, learned from the model's own loader.

vLLM fuses, splits, transposes and renames tensors. For example, `q_proj`, `k_proj` and `v_proj` become rows
of one `qkv_proj`, and each rank (tensor-parallel worker) holds some rows. Only the loader, the model's
`load_weights`, knows how. So `record` runs the loader on probes, which are tensors without memory ("meta"
tensors). A dispatch mode sees every operation of the loader's thread, and records copies from probes into the
model. If the loader computes with a probe instead of copying it, the probe's tensor has no route. A commit
that changes a tensor without a route makes vLLM's loader load all such tensors again.

After loading, vLLM may derive other tensors from the weights, for example for a kernel. Deltas would not
update such tensors, so the model is refused. A tensor that has the same bits as before loading is not
derived. So `install` wraps two functions of vLLM's loaders. One wrapper records which tensors exist before
loading; the other records whether vLLM changes parameters after loading. If the first record is missing,
a tensor outside the parameters counts as derived unless loading fills it or `_NO_WEIGHTS` names it.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from delta_weight_sync.checkpoint import DTYPES, Spec
from delta_weight_sync.errors import RouteError

_ATEN = torch.ops.aten
_MOVES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FILLS = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
# Attributes that hold no weights although they are made, or written, after loading.
_NO_WEIGHTS = {
    "kv_cache": "keys, values and states of requests, which a commit keeps on purpose",
    "cos_sin_cache": "a table of positions, which vLLM casts at the first query",
    "_k_scale_cpu": "1.0, because the cache is not quantized",
    "_v_scale_cpu": "1.0, as above",
}
_DEPTH = 4  # objects between module and tensor; module.quant_method.moe_kernel.fused_experts.tensor has 3
_OPAQUE = (torch.nn.Module, torch.Tensor, type, ModuleType, FunctionType, str, bytes, int, float)
_CHUNK = 1 << 22  # elements hashed at a time on a device; int64 temporaries take 100 MB
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # as an int64: multiplying by it mixes the bits of a position
# Not searched: a captured graph's inputs and outputs, and vLLM's configuration, which has no tensors.
_SKIPPED = ("torch", "vllm.compilation", "vllm.config")

Names = tuple[str, ...]
Shapes = Mapping[str, Sequence[int]]
"""Checkpoint name -> shape of the tensor's words (see `checkpoint`), of which a bf16 element is one."""
Dtypes = Mapping[str, str]
"""Checkpoint name -> dtype, of tensors that are not BF16."""


class Geometry(NamedTuple):
    """A strided part of flat memory, in units of elements; outer dimensions first."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset + last + 1

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """View this part of flat `memory`."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


def part_of(tensor: torch.Tensor) -> Geometry:
    """Where a tensor lies in its storage. Tensors of the same elements give equal results."""
    return Geometry(int(tensor.storage_offset()), *joined(tensor.shape, tensor.stride()))


def joined(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Describe the same elements in as few dimensions as possible. Returns [sizes, strides, ...].

    Sorts the dimensions by the first list of strides, largest stride first. Drops dimensions of one element,
    and merges dimensions that are contiguous in every list of strides.
    """
    dims: list[tuple[int, ...]] = []
    for size, *steps in sorted(zip(sizes, *strides, strict=True), key=lambda dim: -dim[1]):
        if size == 1:
            continue
        if dims and list(dims[-1][1:]) == [size * step for step in steps]:
            size *= dims.pop()[0]
        dims.append((size, *steps))
    return list(zip(*(dims or [(1,) * (1 + len(strides))]), strict=True))


def times_touched(parts: Sequence[Geometry], numel: int) -> torch.Tensor:
    """Count the parts that contain each element: int32 [numel / n], one count per n neighbouring elements.

    n is the largest number for which every part consists of whole groups of n.
    """
    runs = [part.sizes[-1] if part.strides[-1] == 1 else 1 for part in parts]
    steps = [step for part in parts for step in (part.offset, *part.strides[:-1])]
    unit = math.gcd(numel, *runs, *steps)
    touched = torch.zeros(numel // unit, dtype=torch.int32)
    for offset, sizes, strides in parts:
        coarse = (*(stride // unit for stride in strides[:-1]), strides[-1])
        Geometry(offset // unit, (*sizes[:-1], sizes[-1] // unit), coarse).of(touched).add_(1)
    return touched


def storage_of(tensor: torch.Tensor) -> int:
    """An id of a tensor's storage, equal for all its views. Meta tensors have an id, too."""
    return int(tensor.untyped_storage()._cdata)


# 1. Record what the loader copies.


def record(
    model: torch.nn.Module,
    shapes: Shapes,
    dtypes: Dtypes,
    problem_of: Callable[[set[int]], str] | None = None,
) -> "Recorder":
    """Let the model load a probe for each tensor in `shapes`. Nothing is written. Raises `RouteError` if the
    model computes with data that deltas would not update. `problem_of`: see `learn`."""
    recorder = Recorder(model, shapes, dtypes)
    failed = dict[str, str]()
    if recorder.load(shapes):  # it failed: load the probes one by one, to find the cause
        recorder = Recorder(model, shapes, dtypes)
        touched = set[int]()
        for name, shape in shapes.items():
            alone = Recorder(model, {name: shape}, dtypes)
            if reason := alone.load([name]):
                failed[name] = f"vLLM's loader fails on a probe ({reason})"
                touched |= alone.touched
        if reason := recorder.load([name for name in shapes if name not in failed]):
            raise RouteError(f"vLLM's loader fails on probes ({reason})")
        recorder.unroutable |= failed
        recorder.reached |= touched  # of failed tensors; in commits, vLLM's loader fills these parameters
    if name := _unfilled(model, recorder.reached):
        raise RouteError(
            f"{name}: no weight of the run fills this parameter of vLLM's model: start vLLM with the"
            " run's own model, which `delta-weight-sync checkout` writes"
        )
    problem = problem_of(recorder.reached) if problem_of else stale(model, recorder.reached)
    if problem:
        raise RouteError(problem)
    return recorder


def _unfilled(model: torch.nn.Module, reached: Container[int]) -> str:
    """The first parameter whose storage is not in `reached`; "" if there is none."""
    for name, parameter in model.named_parameters():
        served = parameter.numel() and not parameter.is_meta  # --language-model-only leaves towers on meta
        if served and storage_of(parameter) not in reached:
            return name
    return ""


class Recorder(TorchDispatchMode):
    """Records what a loader does with probes."""

    def __init__(self, model: torch.nn.Module, shapes: Shapes, dtypes: Dtypes) -> None:
        super().__init__()
        self._model = model
        specs = {name: Spec.of_words(dtypes.get(name, "BF16"), tuple(shapes[name])) for name in shapes}
        self._probes = {
            name: torch.empty(spec.shape, dtype=getattr(torch, DTYPES[spec.dtype][0]), device="meta")
            for name, spec in specs.items()
        }
        # Name -> copies: (destination, source), of the same shape.
        self.copies: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in shapes}
        self.unroutable: dict[str, str] = {}  # name -> why the loader does more than copy the tensor
        self.touched: set[int] = set()  # storages of the model that the loader wrote or viewed
        self.reached: set[int] = set()  # storages of the model that loading fills
        # Storage -> names of the probes it was made from, and the operation that made it ("": only copies).
        self._origin: dict[int, tuple[Names, str]] = {
            storage_of(probe): ((name,), "") for name, probe in self._probes.items()
        }
        self._live = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._placed: dict[int, list[tuple[str, Geometry]]] = {}  # storage -> copies into it: (name, where)
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that no id is used twice

    def load(self, names: Iterable[str]) -> str:
        """Let the model's loader load these probes; returns the error if it fails, else ""."""
        try:
            with torch.no_grad(), _parameters_kept(self._model), self:
                self._model.load_weights((name, self._probes[name]) for name in names)  # type: ignore[operator]
        except RouteError:
            raise
        except Exception as error:  # noqa: BLE001 - a loader may raise anything on a probe
            return f"{type(error).__name__}: {error}"
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        origins = [self._origin.get(storage_of(tensor), ((), "")) for tensor in _tensors((args, kwargs))]
        names = tuple(dict.fromkeys(name for names, _ in origins for name in names))
        how = next((how for _, how in origins if how), "")
        if any(result.alias_info is not None for result in func._schema.returns):
            self.touched |= self._live & {storage_of(tensor) for tensor in _tensors((args, kwargs))}
        if any(storage_of(tensor) in self._live for tensor in written):
            self._write(func, args, written, names, how)
            return written[0]
        if not names:
            return func(*args, **kwargs)
        if written:
            self._trace(written, names, how or str(func))
            return written[0]
        return self._follow(func, args, kwargs, names, how)

    def _write(self, func: Any, args: Any, written: list[torch.Tensor], names: Names, how: str) -> None:
        """Record a write into the model's memory, without doing it."""
        written = [tensor for tensor in written if not tensor.is_meta]
        if not written:  # parameters that --language-model-only leaves without memory: vLLM drops the tensor
            return
        if names or func in _FILLS:
            self.reached.update(storage_of(tensor) for tensor in written)
        if not names:
            self._overwrite(written, "")
        elif func is not _ATEN.copy_.default or how:
            self._refuse(names, f"computes with it ({how or func})")
        elif not _same_words(args[1].dtype, args[0].dtype):
            self._refuse(names, f"casts it from {args[1].dtype} to {args[0].dtype}")
        elif args[0].element_size() == 1:
            self._refuse(names, "copies single bytes, and commits write 16 bits at a time")
        elif args[0].numel():
            self._overwrite(written, names[0])
            self._placed.setdefault(storage_of(args[0]), []).append((names[0], part_of(args[0])))
            self.copies[names[0]].append((args[0], args[1].expand(args[0].shape)))

    def _overwrite(self, written: list[torch.Tensor], by: str) -> None:
        """Probe `by` is copied to `written`. Earlier copies there become unroutable. A fill has `by` = "".
        Raises `RouteError`, which refuses the model, if an earlier copy there is of another probe."""
        for tensor in written:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            part = part_of(tensor)
            for name, earlier in self._placed.get(storage_of(tensor), ()):
                apart = earlier.end <= part.offset or part.end <= earlier.offset
                if apart or (times_touched([earlier, part], numel) <= 1).all():
                    continue
                if by and by != name:
                    raise RouteError(f"{name} and {by} are one parameter in vLLM: publish only one of them")
                self._refuse((name,), "writes to its place again")

    def _follow(self, func: Any, args: Any, kwargs: Any, names: Names, how: str) -> Any:
        """Run, on meta tensors, an operation that reads a probe and does not write to the model."""
        if func in _MOVES and _same_words(args[0].dtype, kwargs.get("dtype") or args[0].dtype):
            return args[0]  # the original stands for its copy, which has the same numbers
        if func is _ATEN._local_scalar_dense.default:
            self._refuse(names, "reads its values")
            return 0
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        args = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func not in _VIEWS:
                raise
            # The loader views a contiguous copy, but `_MOVES` returned the original, which is not contiguous.
            result = func(args[0].contiguous(), *args[1:])
        new = [tensor for tensor in _tensors(result) if storage_of(tensor) not in self._origin]
        self._trace(new, names, how or str(func))
        return result

    def _trace(self, tensors: list[torch.Tensor], names: Names, how: str) -> None:
        self._kept += tensors
        self._origin.update((storage_of(tensor), (names, how)) for tensor in tensors)

    def _refuse(self, names: Names, reason: str) -> None:
        for name in names:
            self.unroutable.setdefault(name, f"vLLM's loader {reason}")


def _same_words(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a copy from one dtype to the other keeps the words. A bf16 word is the upper half of the same
    number in float32."""
    return source == target or (source, target) == (torch.bfloat16, torch.float32)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes, according to its schema."""
    arguments = func._schema.arguments
    values = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([values.get(name) for name in changed])


@contextmanager
def _parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back parameters that the loader replaced instead of filling, and raise `RouteError` for them."""
    held = [
        (f"{path}.{key}", module, key, parameter, parameter.detach())
        for path, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    replaced = ""
    try:
        yield
    finally:
        for name, module, key, parameter, memory in held:
            # With --language-model-only, parameters that are not served have no memory to compare.
            same = getattr(module, key, None) is parameter
            if not same or not (memory.is_meta or parameter.data.is_set_to(memory)):
                replaced = replaced or name
                setattr(module, key, parameter)
                parameter.data = memory
    if replaced:
        raise RouteError(f"{replaced}: vLLM's loader replaces this parameter instead of filling it")


# 2. Turn the record into routes.


class Piece(NamedTuple):
    """One recorded copy: where a strided part of a checkpoint tensor is in a parameter of vLLM.

    `memory` is a flat int16 view of the parameter, from the part's first word to its last. If a bf16 tensor
    lies in a float32 parameter, every other int16 is one of its words.
    """

    memory: torch.Tensor
    source: Geometry  # where the part lies in the row-major checkpoint tensor
    target: Geometry  # where the same elements lie in `memory`, in the same dimensions


class Route(NamedTuple):
    """All pieces of one checkpoint tensor on this rank: none if other ranks hold it, several if split."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self, which: Sequence[int]) -> torch.Tensor:
        """Read the live bits of the pieces `which` (indices into `pieces`): row-major int16 [numel].

        Elements of other pieces are 0. A piece that is the whole tensor, in the same order, is returned as a
        view, not a copy.
        """
        chosen = [self.pieces[number] for number in which]
        numel = math.prod(self.shape)
        if len(chosen) == 1 and chosen[0].source == chosen[0].target == (0, (numel,), (1,)):
            return chosen[0].memory
        bits = torch.zeros(numel, dtype=torch.int16, device=chosen[0].memory.device if chosen else None)
        for piece in chosen:
            piece.source.of(bits).copy_(piece.target.of(piece.memory))
        return bits


Sources = dict[str, tuple[Geometry, ...] | str]
"""What one rank holds: name -> the tensor's parts, or why it has no route. Sent to other ranks."""


class Learned(NamedTuple):
    """What a rank learned: the routes, and the `sources` that `ownership` needs from every rank."""

    routes: dict[str, Route]
    sources: Sources


def learn(
    model: torch.nn.Module,
    shapes: Shapes,
    dtypes: Dtypes | None = None,
    problem_of: Callable[[set[int]], str] | None = None,
) -> Learned:
    """Learn the routes of the tensors in `shapes`. Nothing is written. Raises `RouteError` for a model that
    deltas cannot update.

    `problem_of`: Gets the storages that loading fills, and names a tensor that deltas would leave stale, as
        `stale` does. `stale(model, ...)` if it is None.
    """
    recorder = record(model, shapes, dtypes or {}, problem_of)
    routes = dict[str, Route]()
    sources: Sources = {**recorder.unroutable}
    for name, shape in shapes.items():
        if name not in sources:
            pieces = tuple(piece for copy in recorder.copies[name] for piece in _pieces(*copy))
            routes[name] = Route(tuple(shape), pieces)
            sources[name] = _sources(pieces)
    return Learned(routes, sources)


def with_copy(
    learned: Learned, model: torch.nn.Module, copy: torch.nn.Module, shapes: Shapes, dtypes: Dtypes
) -> Learned:
    """Add the places of the tensors in a second model, which may share parameters with `model`. What only the
    second model has is learned, too. Raises `RouteError` if deltas cannot update all of it."""
    shared = {storage_of(parameter) for parameter in model.parameters()}
    recorder = Recorder(copy, shapes, dtypes)
    if reason := recorder.load(shapes):
        raise RouteError(f"vLLM's loader fails on probes ({reason})")
    if name := _unfilled(copy, recorder.reached | shared):
        raise RouteError(f"the run has no weights for {name}")
    if problem := stale(copy, recorder.reached | shared):
        raise RouteError(problem)
    routes = dict(learned.routes)
    sources = dict(learned.sources)
    for name, copies in recorder.copies.items():
        apart = [(target, source) for target, source in copies if storage_of(target) not in shared]
        if name in recorder.unroutable or (apart and name not in routes):
            raise RouteError(f"{name}: {recorder.unroutable.get(name, sources[name])}")
        if apart:
            pieces = tuple(piece for each in apart for piece in _pieces(*each))
            routes[name] = Route(routes[name].shape, routes[name].pieces + pieces)
            sources[name] = _sources(routes[name].pieces)
    return Learned(routes, sources)


def _sources(pieces: Sequence[Piece]) -> tuple[Geometry, ...]:
    return tuple(Geometry(p.source.offset, *joined(*p.source[1:])) for p in pieces)


def ownership(
    shapes: Shapes, ranks: Sequence[Sources]
) -> tuple[list[dict[str, tuple[int, ...]]], dict[str, str]]:
    """Decide which pieces each rank adds to the digest, so that every element counts once.

    Returns for each rank {name: indices of pieces}, then {name: reason} for tensors without a route. If ranks
    hold equal parts, the first such rank adds it. Raises `RouteError` if unequal parts overlap or leave gaps.
    """
    owned: list[dict[str, tuple[int, ...]]] = [{} for _ in ranks]
    unroutable: dict[str, str] = {}
    for name, shape in shapes.items():
        held = [sources[name] for sources in ranks]
        parts = [each for each in held if not isinstance(each, str)]
        if len(parts) < len(held) or not any(parts):
            reasons = (each for each in held if isinstance(each, str))
            unroutable[name] = next(reasons, "vLLM's loader drops it")
            continue
        first: dict[Geometry, tuple[int, int]] = {}  # part -> the first rank with it, and its index there
        for rank, theirs in enumerate(parts):
            for number, part in enumerate(theirs):
                first.setdefault(part, (rank, number))
        if (times_touched(list(first), math.prod(shape)) != 1).any():
            raise RouteError(f"{name}: its parts in vLLM overlap, or do not cover all of it: {list(first)}")
        for rank, mine in enumerate(owned):
            mine[name] = tuple(number for at, number in first.values() if at == rank)
    return owned, unroutable


def _pieces(destination: torch.Tensor, source: torch.Tensor) -> list[Piece]:
    """Turn a copy into a piece, or if the source is broadcast, into a piece for each repetition."""
    for dim, size in enumerate(source.shape):
        if size > 1 and source.stride(dim) == 0:
            pairs = zip(destination.unbind(dim), source.unbind(dim), strict=True)
            return [piece for pair in pairs for piece in _pieces(*pair)]
    end = 1 + sum(
        (size - 1) * step for size, step in zip(destination.shape, destination.stride(), strict=True)
    )
    memory = destination.detach().as_strided((end,), (1,)).view(torch.int16)
    words = source.element_size() // 2
    wide = destination.element_size() // 2
    # The last dimension is that of the words of an element. A bf16 word is the upper half of a float32.
    sizes, strides, places = joined(
        (*source.shape, words),
        (*(step * words for step in source.stride()), 1),
        (*(step * wide for step in destination.stride()), 1),
    )
    first = Geometry(int(source.storage_offset()) * words, sizes, strides)
    return [Piece(memory, first, Geometry(wide - words, sizes, places))]


# 3. Find tensors that vLLM derives from the weights.

Fingerprint = tuple[torch.Size, int]
"""Shape and hash of a tensor."""

# What a model held before loading, by path. The tensors are kept, so that their ids are not used again.
_before: WeakKeyDictionary[torch.nn.Module, dict[str, tuple[torch.Tensor, Fingerprint]]] = WeakKeyDictionary()
# The names of the parameters that vLLM changed after loading.
_changed: WeakKeyDictionary[torch.nn.Module, list[str]] = WeakKeyDictionary()


def install() -> None:
    """Wrap the loaders of this process, once."""
    from vllm.model_executor.model_loader import base_loader as loader

    if not isinstance(loader.initialize_model, partial):
        loader.initialize_model = partial(watch_build, loader.initialize_model)
        loader.process_weights_after_loading = partial(watch_finish, loader.process_weights_after_loading)


def watch_build(build: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Call `build`, which returns a model without weights, and record what the model holds."""
    model = build(*args, **kwargs)
    parameters = {storage_of(parameter) for parameter in model.parameters()}
    kept = {path: tensor for path, tensor in floating(model) if storage_of(tensor) not in parameters}
    _before[model] = {path: (tensor, fingerprint(tensor)) for path, tensor in kept.items()}
    return model


def watch_finish(finish: Callable[..., None], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Call `finish`, which may change loaded parameters, and record which it changes."""
    before = _parameters(model)
    finish(model, *args, **kwargs)
    after = _parameters(model)
    _changed[model] = [name for name, bits in before.items() if after.get(name) != bits]


def stale(model: torch.nn.Module, filled: set[int], apart: Container[str] = ()) -> str:
    """A sentence that names a tensor which deltas would leave stale; "" if there is none.

    `filled`: the storages that loading fills. `apart`: the names of modules that are not judged.
    """
    changed = [name for name in _changed.get(model, []) if name.rpartition(".")[0] not in apart]
    if changed:
        return (
            f"{changed[0]}: vLLM changes it after loading, so deltas would not fit; start vLLM without "
            "quantization, add --moe-backend triton for a mixture of experts, or --attention-backend CPU_MLA "
            "for MLA on a CPU"
        )
    before = _before.get(model, {})
    known = filled | {storage_of(parameter) for parameter in model.parameters()}
    for path, tensor in floating(model, apart):
        storage = storage_of(tensor)
        if storage in known or not _NO_WEIGHTS.keys().isdisjoint(path.split(".")):
            continue
        then, bits = before.get(path, (None, None))
        if then is None or storage_of(then) != storage or fingerprint(tensor) != bits:
            return (
                f"{path}: vLLM keeps it outside of the parameters and may have computed it from them, so "
                "deltas would not update it; try another --attention-backend, or serve another model"
            )
    return ""


def floating(model: torch.nn.Module, apart: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every floating-point tensor of a model, except in the modules `apart`."""
    modules = ((path, module) for path, module in model.named_modules() if path not in apart)
    yield from ((path, found) for path, found in held(modules) if found.is_floating_point() and found.numel())


def held(
    modules: Iterable[tuple[str, torch.nn.Module]], depth: int = _DEPTH
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor that modules, given as (path, module), hold.

    Searches all attributes of the modules, but not of their submodules, and the plain objects, lists and
    dictionaries in them, `depth` levels deep.
    """
    queue = deque((path, vars(module), 0) for path, module in modules)
    met: set[int] = set()  # the search is breadth first, so each object gets its shortest path
    while queue:
        path, holder, level = queue.popleft()
        for key, value in _inside(holder):
            name = path if key in ("_parameters", "_buffers") else f"{path}.{key}".lstrip(".")
            if isinstance(value, torch.Tensor):
                yield name, value
            elif level < depth and id(value) not in met and not isinstance(value, _OPAQUE):
                met.add(id(value))
                queue.append((name, value, level if name == path else level + 1))


def _inside(holder: Any) -> Iterable[tuple[Any, Any]]:
    if type(holder).__module__.startswith(_SKIPPED):
        return ()
    if isinstance(holder, list | tuple):
        return enumerate(holder)
    return list((holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).items())


def _parameters(model: torch.nn.Module) -> dict[str, Fingerprint]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: fingerprint(parameter) for name, parameter in named if parameter.is_floating_point()}


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """The shape and a hash of a tensor. On one device, tensors with equal bits have equal hashes."""
    flat = tensor.detach().reshape(-1).contiguous()
    wide = flat.view(torch.int16) if flat.element_size() > 1 else flat.view(torch.uint8).to(torch.int16)
    if not flat.is_cpu:
        return tensor.shape, 0 if flat.is_meta else hashed(wide)
    # Imported late, because it imports numba: a vLLM that starts would find numba's kernels, and crash.
    from delta_weight_sync.digest import tensor_digest

    return tensor.shape, tensor_digest("", wide.numpy().view("uint16"))


def hashed(bits: torch.Tensor) -> int:
    """A hash of int16 [n], computed on its device: copying all parameters to the host would take longer."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        factor = torch.arange(start, start + len(part), device=bits.device) * _MIX  # modulo 2^64
        total += (((factor ^ (factor >> 32)) * _MIX | 1) * part).sum()
    return int(total)
