"""Commits to models that vLLM quantizes while it loads them (`--quantization fp8_per_block`).

A run publishes bf16 weights. After a commit, each byte of the quantized model is as if vLLM had loaded the
new version. No code here knows a scheme:

- The *twin* is a second model object of the same class. Its unquantized parameters are the live ones. Its
  quantized layers hold, in host memory, the weights that vLLM's loader fills before it quantizes them (the
  *mirror*). So routes, table, digest and staging treat the twin as they treat an unquantized model.
- Staging patches the mirror, quantizes each touched layer again by vLLM's own method in scratch memory, and
  compares every tensor that the layer, its method and its kernel hold with the live one. The words that
  differ are committed. If the stage is not committed, the next stage first takes its patch out of the mirror.

There are two digests. The published one is that of mirror and unquantized parameters. The digest of the
quantized tensors is equal on replicas that quantize in the same way: with the same scheme, release of vLLM
and kind of device. When a worker learns its first run, all quantized tensors must equal, byte for byte, what
the mirror gives.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor, set_default_torch_dtype

from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.errors import CodecError, RouteError, WeightsChangedError
from delta_weight_sync.util import size_text
from delta_weight_sync.vllm import memory, routes
from delta_weight_sync.vllm.memory import Changes, Step, Table
from delta_weight_sync.vllm.routes import Dtypes, Geometry, Learned, Piece, Route, Shapes
from delta_weight_sync.vllm.worker import Answer, DeltaWorker, Fallback, LiveWeights, Ranks, Staged, memory_of

# Objects between a layer and a tensor; quant_method.moe_kernel.fused_experts.quant_config._w1 has 5.
_DEPTH = 6
_COPIED = 3  # levels of a layer's quantization method that are copied before it runs
_log = logging.getLogger("delta_weight_sync")


class Twin:
    """The twin of a live model, and its mirror, which is empty until `fill`.

    Attributes:
        model: The twin.
        layers: Name -> quantized layer of the twin.
        nbytes: Bytes of the mirror.
    """

    def __init__(self, config: Any, live: torch.nn.Module) -> None:
        """`config`: vLLM's. Raises `RouteError` if vLLM did not quantize the model, or not while loading."""
        model_config = config.model_config
        if stored := getattr(model_config.hf_config, "quantization_config", None):
            method = stored.get("quant_method", "unknown method") if isinstance(stored, dict) else stored
            raise RouteError(
                f"the checkpoint that vLLM serves is quantized ({method}), but this run publishes unquantized"
                " weights: start vLLM with the run's own model and --quantization fp8_per_block"
            )
        self.scheme = str(model_config.quantization)
        self._live = live
        self._modules = dict(live.named_modules())
        self._config = _apart(config)
        self._device = next(live.parameters()).device
        try:
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                self.model = initialize_model(vllm_config=self._config)
        except Exception as error:
            raise RouteError(
                f"vLLM cannot build this model a second time, without memory ({error!r}): start vLLM without"
                " --quantization"
            ) from error
        self.layers = {
            name: module
            for name, module in self.model.named_modules()
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
        }
        self.nbytes = sum(p.nbytes for layer in self.layers.values() for p in layer.parameters(recurse=False))
        available = psutil.virtual_memory().available
        said = f"--quantization {self.scheme} keeps {size_text(self.nbytes)} of weights in host memory"
        if self.nbytes > available:
            raise RouteError(
                f"{said}, but only {size_text(available)} are available: use a machine with more memory, or"
                " start vLLM without --quantization"
            )
        _log.info("%s, for each worker; available: %s", said, size_text(available))
        mirrors: dict[torch.nn.Parameter, Any] = {}
        for module in self.layers.values():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter not in mirrors:
                    mirrors[parameter] = self._mirror_of(parameter)
                module._parameters[key] = mirrors[parameter]
        for name, module in self.model.named_modules():
            if name not in self.layers:
                self._share(name, module, mirrors)
        self.filled = False
        self._places: dict[str, torch.Tensor] = {}  # path -> words of the live tensor

    def _mirror_of(self, parameter: torch.nn.Parameter) -> Any:
        """Host memory for a parameter on the meta device, which a GPU can read; with vLLM's plain loader."""
        there = self._device.type != "cpu"
        memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=there)
        mirror = _like(get_accelerator_view_from_cpu_tensor(memory) if there else memory, parameter)
        # Its wrapper would quantize as soon as the layer is complete.
        while getattr(getattr(mirror, "weight_loader", None), "__name__", "") == "online_process_loader":
            mirror.weight_loader = mirror.weight_loader.__wrapped__
        return mirror

    def _share(self, name: str, module: torch.nn.Module, mirrors: Mapping[torch.nn.Parameter, Any]) -> None:
        """Replace an unquantized module's tensors by the live ones, or by those of the mirror if a quantized
        layer has them, too (a bias of a router, which its experts hold)."""
        theirs = self._modules[name]
        for key, mine in module.named_parameters(recurse=False):
            if mine in mirrors:
                module._parameters[key] = mirrors[mine]
                continue
            parameter = theirs._parameters.get(key)
            if parameter is None or (parameter.dtype, parameter.shape) != (mine.dtype, mine.shape):
                raise RouteError(
                    f"{name}.{key}: vLLM changes it after loading, so deltas would not fit; start vLLM"
                    " without --quantization, or serve another model"
                )
            module._parameters[key] = parameter
        for key in module._buffers:
            if key in theirs._buffers:
                module._buffers[key] = theirs._buffers[key]

    def learn(self, shapes: Shapes, dtypes: Dtypes) -> Learned:
        """Learn the routes to the twin's parameters. Raises `RouteError` as `routes.learn` does."""
        learned = routes.learn(self.model, shapes, dtypes, self._problem)
        for name, source in learned.sources.items():
            if isinstance(source, str):
                raise RouteError(
                    f"{name}: {source}, so it cannot be quantized again: start vLLM without --quantization"
                )
        return learned

    def _problem(self, filled: set[int]) -> str:
        layers = [self._modules[name] for name in self.layers]
        known = filled | {routes.storage_of(p) for layer in layers for p in layer.parameters(recurse=False)}
        for name, parameter in self._live.named_parameters():
            served = parameter.numel() and not parameter.is_meta
            if served and routes.storage_of(parameter) not in known:
                return (
                    f"{name}: vLLM computes it from other weights, so deltas would not update it; leave these"
                    " unquantized by an `ignore` in --quantization-config (kv_b_proj for MLA), or start vLLM"
                    " without --quantization"
                )
        return routes.stale(self._live, filled, self.layers)

    def layers_at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """The layer, as an index into `layers`, whose part of the mirror has each address; -1 if none has."""
        spans = sorted(
            (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, number)
            for number, layer in enumerate(self.layers.values())
            for parameter in layer.parameters(recurse=False)
        )
        starts, ends, numbers = np.array([(-1, -1, -1), *spans], np.int64).T
        at = np.searchsorted(starts, addresses, side="right") - 1
        return np.where(addresses < ends[at], numbers[at], -1)

    def in_mirror(self, learned: Mapping[str, Route]) -> dict[str, list[Piece]]:
        """Name -> pieces in the mirror, of each checkpoint tensor that has some."""
        pieces = [(name, piece) for name, route in learned.items() for piece in route.pieces]
        inside = self.layers_at(np.array([piece.memory.data_ptr() for _, piece in pieces], np.int64)) >= 0
        found: dict[str, list[Piece]] = {}
        for (name, piece), here in zip(pieces, inside.tolist(), strict=True):
            if here:
                found.setdefault(name, []).append(piece)
        return found

    def fill(self, pieces: Mapping[str, Sequence[Piece]], tensors: Iterable[tuple[str, Bits]]) -> None:
        """Write the weights that vLLM loaded into the mirror."""
        for name, bits in tensors:
            words = torch.from_numpy(bits.view(np.int16)).reshape(-1)
            for piece in pieces[name]:
                piece.target.of(piece.memory).copy_(piece.source.of(words))
        self.filled = True

    def places(self) -> dict[str, torch.Tensor]:
        """Find all live tensors of the quantized layers: path -> their words, flat int16.

        Raises `RouteError` if a layer cannot be quantized again, if a tensor of it cannot be compared, or, at
        the first call, if the mirror does not give what vLLM loaded.
        """
        first = not self._places
        places = dict[str, torch.Tensor]()
        with mock.patch("torch.distributed.all_reduce", self._refuse_to_agree):
            for name, layer in self.layers.items():
                both = [*self.compared(name)]
                # A weight takes at least four bits, in the coarsest scheme.
                least = sum(p.numel() for p in layer.parameters(recurse=False)) / 2
                if sum(live.nbytes for _, live, _ in both) < least:
                    raise self._hidden(name, "no tensor holds them")
                for path, live, new in both:
                    if first and not torch.equal(live, new):
                        raise RouteError(
                            f"{path}: quantizing the published weights again does not give what vLLM loaded;"
                            " start vLLM without --quantization"
                        )
                    places[path] = live
        self._places = places
        return places

    def compared(self, name: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Quantize a layer's mirror again. Yields the path of each tensor that the live layer holds, its live
        words, and the words that a fresh load would give; both flat int16. Nothing is written."""
        mine, constant = self._rebuilt(name)
        theirs = dict(_held(name, self._modules[name]))
        if strange := sorted(mine.keys() ^ theirs.keys()):
            raise self._hidden(name, strange[0])
        met = dict[tuple[int, int], int]()  # place of a live tensor -> place of the new one
        for path, live in theirs.items():
            new = mine[path]
            if not live.numel() or new.data_ptr() == live.data_ptr() != 0 or path in constant:
                continue
            if (new.dtype, new.shape, new.stride()) != (live.dtype, live.shape, live.stride()) or new.is_meta:
                raise self._hidden(name, path)
            place = live.data_ptr(), live.nbytes
            if place not in met:
                met[place] = new.data_ptr()
                yield path, self._words(name, path, live), self._words(name, path, new)
            elif met[place] != new.data_ptr():  # two attributes that are one tensor here, but two there
                raise self._hidden(name, path)

    def _rebuilt(self, name: str) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Run vLLM's own method on a copy of a layer of the twin. Returns all tensors that the copy then
        holds, by path, and the paths of meta tensors that the method left alone, such as a map of experts."""
        layer = self.layers[name]
        scratch = copy.copy(layer)
        scratch.__dict__ = dict(vars(layer))
        scratch._parameters = {
            key: parameter if parameter is None else _like(parameter.detach().clone(), parameter)
            for key, parameter in layer._parameters.items()
        }
        scratch._buffers = dict(layer._buffers)
        method = _copied(layer.quant_method, _COPIED)
        scratch.__dict__["quant_method"] = method
        before = {path: tensor for path, tensor in _held(name, layer) if tensor.is_meta}
        try:
            with set_current_vllm_config(self._config), torch.no_grad():
                method.process_weights_after_loading(scratch)
        except (RouteError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RouteError(
                f"{name}: vLLM cannot quantize this layer again ({error!r}): start vLLM without"
                " --quantization"
            ) from error
        after = dict(_held(name, scratch))
        return after, {path for path, tensor in after.items() if tensor is before.get(path)}

    def _words(self, name: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """The words of a tensor, flat int16, in the order of its memory: a view."""
        dims = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        dense = tensor.detach().permute(dims)
        if not dense.is_contiguous() or tensor.nbytes % 2 or tensor.data_ptr() % 2:
            raise self._hidden(name, path)
        return dense.reshape(-1).view(torch.uint8).view(torch.int16)

    def _hidden(self, name: str, what: str) -> RouteError:
        return RouteError(
            f"{name}: vLLM keeps this layer's weights where they cannot be compared ({what}): use another"
            " --quantization or --linear-backend, or start vLLM without --quantization"
        )

    def _refuse_to_agree(self, *_: object, **__: object) -> None:
        raise RouteError(
            f"with --quantization {self.scheme}, vLLM's workers agree on each scale while they load, which"
            " staging cannot repeat while vLLM generates: use --quantization fp8_per_block, or one worker"
        )


class _State(NamedTuple):
    """What is known of the quantized tensors after a commit."""

    own: int  # this worker's share of their digest
    facts: dict[str, Any]  # for the replica's status, see `runlog.Quantization`


class QuantizedWeights(LiveWeights):
    """The checkpoint's tensors in a twin, and what vLLM made of them by quantizing."""

    def __init__(
        self,
        twin: Twin,
        routes: dict[str, Route],
        owned: dict[str, tuple[int, ...]],
        fallback: Fallback,
        ranks: Ranks,
    ) -> None:
        """The mirror must be filled. Raises `RouteError` as `Twin.places` does."""
        super().__init__(routes, owned, fallback, ranks)
        self._twin = twin
        self._layers = [*twin.layers]
        self._layer = twin.layers_at(self._table.rows[:, memory.ADDRESS])  # of each row, or -1
        with ranks.fail_together():
            self._words = twin.places()
            flat = {path: Geometry(0, (words.numel(),), (1,)) for path, words in self._words.items()}
            made = {p: Route((flat[p].end,), (Piece(self._words[p], flat[p], flat[p]),)) for p in flat}
            self._places = Table(made, dict.fromkeys(made, (0,)))
            self._quantized = memory_of(self._places)
            own = self._quantized.digest()
        self._stream = torch.cuda.Stream(self._table.device) if self._table.device.type == "cuda" else None
        self._state = _State(own, self._facts(own, 0))
        self._patch: Step | None = None  # of the mirror, by a stage that is not committed

    def _facts(self, own: int, changed: int) -> dict[str, Any]:
        """Collect what all workers say: a digest's shares, and how many bytes change."""
        digests, counts = zip(*self._ranks.gather((own, changed)), strict=True)
        return {"scheme": self._twin.scheme, "digest": to_hex(sum(digests)), "changed": sum(counts)}

    @property
    def facts(self) -> Answer:
        """Scheme and digest of the quantized tensors, and how much of them the last commit changed."""
        return {"quantized": self._state.facts}

    def recheck(self) -> None:
        """Hash a part of the parameters and of the quantized tensors again."""
        super().recheck()
        self._quantized.recheck()

    def withdraw(self) -> None:
        """Take the patch of a stage that was not committed out of the mirror."""
        if self._patch:
            self._patch.undo()
            self._patch = None

    def stage(self, paths: Sequence[Path], known: int) -> Staged:
        """As `LiveWeights.stage`. Quantizes again each layer that the deltas touch."""
        self._all = False
        with self._ranks.fail_together():
            self.withdraw()
            self._own = self._quantized.known_digest()
            if self._own != self._state.own:
                raise WeightsChangedError(
                    "something else changed the quantized weights: this worker's share of their digest is"
                    f" {to_hex(self._own)}, not {to_hex(self._state.own)}"
                )
        return super().stage(paths, known)

    def stage_checkpoint(self, folder: Path) -> Staged:
        """As `LiveWeights.stage_checkpoint`. Quantizes all layers again, so it repairs quantized tensors."""
        self._all = True
        with self._ranks.fail_together():
            self.withdraw()
            self._own = self._quantized.digest()
        return super().stage_checkpoint(folder)

    def _staged(self, found: Iterable[Changes], reloaded: list[Patch], live: int) -> Staged:
        changes = Changes.joined(found)
        layer = self._layer[changes.rows]
        before = self._state
        with self._ranks.fail_together(), torch.cuda.stream(self._stream):
            patch, moved = self.memory.prepare(_some(changes, layer >= 0))
            self._patch = patch
            wrong, _ = patch.do()
            if wrong:
                raise CodecError(
                    f"{wrong} weights in host memory read back differently from what was written"
                )
            touched = {*layer[changes.counts > 0].tolist()} - {-1}
            self._changed = 0
            again = Changes.joined(self._again(range(len(self._layers)) if self._all else sorted(touched)))
            write, quantized_moved = self._quantized.prepare(again)
        own = (self._own + quantized_moved) % (1 << 64)
        after = _State(own, self._facts(own, self._changed))
        staged = super()._staged([_some(changes, layer < 0)], reloaded, live + sum(self._ranks.gather(moved)))

        def keep() -> tuple[int, float]:
            self._patch = None
            self._state = after
            return 0, 0.0

        def put_back() -> None:
            self._patch = None
            self._state = before
            patch.undo()

        return Staged(staged.digest, [Step(keep, put_back), *staged.steps, write])

    def _again(self, numbers: Iterable[int]) -> Iterator[Changes]:
        """Quantize layers again. Yields what differs from the live tensors, by row of `_places`."""
        table = self._places
        for number in numbers:
            for path, live, new in self._twin.compared(self._layers[number]):
                if path not in self._words or live.data_ptr() != self._words[path].data_ptr():
                    raise RouteError(f"{path}: vLLM moved this tensor after it was loaded: start vLLM again")
                rows = range(*table.starts[table.number[path] :][:2])
                for row, first, count in table.parts[rows].tolist():
                    begin = table.rows[row, memory.FIRST] + first
                    old = live[begin : begin + count]
                    now = new[begin : begin + count]
                    index = (old != now).nonzero()[:, 0]
                    self._changed += int((old[index] ^ now[index]).view(torch.uint8).count_nonzero())
                    ulps = (now[index] - old[index]).cpu().numpy().view(np.uint16)
                    element = index.to(torch.int32).cpu().numpy()
                    yield Changes(np.array([row]), np.array([ulps.size]), element, ulps)


class QuantizedWorker(DeltaWorker):
    """A `DeltaWorker` of a model that vLLM quantizes while it loads. Its model is the twin."""

    weights: QuantizedWeights

    def __init__(self, worker: Any) -> None:
        """Raises `RouteError` if the replica cannot follow a run."""
        super().__init__(worker)
        self._twin = Twin(self._config, self._model)
        self._model = self._twin.model

    def learn(self, shapes: dict[str, list[int]], dtypes: dict[str, str] | None = None) -> Answer:
        """As `DeltaWorker.learn`. The answer also has facts about the quantized tensors."""
        if hasattr(self, "weights"):
            self.weights.withdraw()
        self._tensors = shapes, dtypes or {}
        return super().learn(shapes, dtypes) | self.weights.facts

    def commit(self, digest: str, label: str) -> Answer:
        """As `DeltaWorker.commit`. The answer also has facts about the quantized tensors."""
        return super().commit(digest, label) | self.weights.facts

    def _find(self, shapes: Shapes, dtypes: Dtypes) -> Learned:
        return self._twin.learn(shapes, dtypes)

    def _weights(
        self, routes: dict[str, Route], owned: dict[str, tuple[int, ...]], fallback: Fallback
    ) -> QuantizedWeights:
        if not self._twin.filled:
            pieces = self._twin.in_mirror(routes)
            reasons = dict.fromkeys(pieces, "vLLM quantizes it")
            with self._ranks.fail_together():
                self._twin.fill(pieces, self._loaded(reasons, *self._tensors))
        return QuantizedWeights(self._twin, routes, owned, fallback, self._ranks)


def _apart(config: Any) -> Any:
    """A copy of vLLM's configuration, in which a second model can register its layers."""
    config = copy.copy(config)
    compilation = copy.copy(config.compilation_config)
    config.compilation_config = compilation
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    return config


def _like(tensor: torch.Tensor, parameter: Any) -> Any:
    """Give `tensor` the class and the attributes of a parameter of vLLM."""
    tensor.__class__ = parameter.__class__
    tensor.__dict__ = parameter.__dict__.copy()
    return tensor


def _copied(method: Any, levels: int) -> Any:
    """Copy one of vLLM's plain objects, and those in it, because quantizing writes to them."""
    plain = hasattr(method, "__dict__") and not isinstance(method, torch.nn.Module)
    if not levels or not plain or not type(method).__module__.startswith("vllm.model_executor"):
        return method
    made = copy.copy(method)
    made.__dict__.update({key: _copied(value, levels - 1) for key, value in vars(method).items()})
    return made


def _held(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return routes.held([(name, module)], _DEPTH)


def _some(changes: Changes, chosen: NDArray[np.bool_]) -> Changes:
    """The changes of those entries of `changes.rows` that are chosen."""
    each: Index = np.repeat(chosen, changes.counts)
    return Changes(changes.rows[chosen], changes.counts[chosen], changes.element[each], changes.ulps[each])
