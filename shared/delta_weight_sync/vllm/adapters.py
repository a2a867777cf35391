"""A vLLM with `--enable-lora` that serves the versions of a run as adapters, side by side.

Version 41 of run `policy` is the model `policy@41`, and `policy` is the newest version. A request for
`policy` is answered by the version that is newest when it comes, from the first token to the last; `model` in
the answer says which one. vLLM's own calls load and remove adapters between two steps. Each version has its
own path, because vLLM finds cached prefixes by an adapter's name and path.

vLLM forgets the adapter that was used least recently, and loads it again from its folder when a request needs
it. So a folder must stay until no request can need it. Every request refers to its adapter's `Version`, so
that is when Python drops this object.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from delta_weight_sync import compat
from delta_weight_sync.checkpoint import ADAPTER, map_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.engine import Dtypes, Shapes, Times
from delta_weight_sync.errors import CodecError, EngineError, RouteError
from delta_weight_sync.reader import apply_delta
from delta_weight_sync.util import Guard
from delta_weight_sync.vllm import NO_SLEEP, hooks
from delta_weight_sync.vllm.engine import Engine

# Dtypes of adapters in a version, and those that can hold all their values.
_HOLDS: Final = {"BF16": ("bfloat16", "float32"), "F16": ("float16", "float32")}
_BASE: Final = "start vLLM with the base of the adapter as model"


class Version(LoRARequest, weakref=True, dict=True, array_like=True, omit_defaults=True):  # type: ignore[call-arg]
    """A version as vLLM knows it. Its attribute `label` is the label of its tokens, see `engine.label_of`;
    `digest` is that of its tensors."""


class AdapterEngine(Engine):
    """A running vLLM that takes each version as an adapter of its own."""

    adapters = True

    def __init__(self, client: Any, loop: Any, models: Any, name: str, folder: Path) -> None:
        """
        Args:
            client: vLLM's `EngineClient`, which lives in `loop`.
            loop: The server's event loop.
            models: The server's `OpenAIServingModels`.
            name: The run's name, under which the newest version is served.
            folder: Scratch space for the versions that are served.
        """
        super().__init__(client, loop)
        self._models = models
        self._name = name
        self._folder = folder / "adapters"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._served: dict[str, Version] = {}  # by name, oldest first
        self._unused: list[tuple[int, Path]] = []  # id and folder of versions that no request needs
        self._newest: Version | None = None
        # Also those to which only requests refer. vLLM takes two adapters of one name for the same one.
        self._alive = weakref.WeakValueDictionary[str, Version]()
        self._guard = Guard("the removal of adapters that no request needs")

    def describe(self) -> str:
        """The release of vLLM, and how many versions it serves at the same time."""
        name, version = compat.installed(hooks.VLLM)
        return f"{name} {version}; serves the newest {self._room()} versions as adapters"

    def learn(self, shapes: Shapes, dtypes: Dtypes) -> str:
        """Check that this vLLM can serve the run's adapters. Returns no digest: each version is checked when
        it is loaded."""
        config = self._client.vllm_config
        if config.model_config.enable_sleep_mode:  # which takes the adapters away, too
            raise EngineError(NO_SLEEP, RouteError.kind)
        if self._models.is_base_model(self._name):
            raise EngineError(
                f"vLLM serves its base as {self._name!r}, the name of the run: choose another"
                " --served-model-name",
                RouteError.kind,
            )
        known = self._models.lora_requests.get(self._name)
        if known is not None and not isinstance(known, Version):
            raise EngineError(
                f"vLLM already has an adapter named {self._name!r}, as the run: drop it from --lora-modules",
                RouteError.kind,
            )
        # PEFT's names end in lora_A.weight, [rank, inputs], or lora_embedding_A, [rank, vocabulary].
        ranks = [shape[0] for name, shape in shapes.items() if re.search(r"lora_(embedding_)?A(\.|$)", name)]
        rank = max(ranks, default=0)
        if rank > config.lora_config.max_lora_rank:
            raise EngineError(
                f"the adapter has rank {rank}, but vLLM takes {config.lora_config.max_lora_rank} at most:"
                f" start vLLM with --max-lora-rank, at least {rank}",
                RouteError.kind,
            )
        held = str(config.lora_config.lora_dtype).removeprefix("torch.")
        for name in shapes:
            dtype = dtypes.get(name, "BF16")
            if held not in _HOLDS.get(dtype, ()):
                raise EngineError(
                    f"{name} is {dtype}, which vLLM would round to {held}: start vLLM with another --dtype",
                    CodecError.kind,
                )
        return ""

    def stop(self) -> None:
        """Answer no later request: another run may be followed, in the same folder."""
        for name in (*self._served, self._name):
            self._models.lora_requests.pop(name, None)

    def take(self, deltas: Sequence[Path], digest: str, label: str) -> Times:
        """Serve the version that delta files lead to from the newest one."""
        assert self._newest is not None, "a follower joins a version before it takes a delta"
        return self._serve(Path(self._newest.lora_path), deltas, digest, label)

    def take_checkpoint(self, folder: Path, digest: str, label: str) -> Times:
        """Serve the version in a folder."""
        return self._serve(folder, (), digest, label)

    def relabel(self, label: str) -> None:
        """Serve the newest adapter as another version, too."""
        assert self._newest is not None, "a follower joins a version before it renames it"
        self._serve(Path(self._newest.lora_path), (), self._newest.digest, label)

    def _serve(self, source: Path, deltas: Sequence[Path], digest: str, label: str) -> Times:
        """Copy a version's folder, apply deltas to the copy, check its digest, and serve it. A version that
        some request still needs is served as it is."""
        started = time.perf_counter()
        name = f"{self._name}@{json.loads(label)['version']}"
        unused = self._unused  # before vLLM is called: see `_forget`
        self._unused = []
        try:
            version = self._alive.get(name)
            if version is None or version.digest != digest:
                version = self._made(name, source, deltas, digest, label)
            ready = time.perf_counter()
            self._wait(self._answer_with(name, version))
        except BaseException:
            self._unused += unused
            raise
        self._newest = version
        took = time.perf_counter() - ready
        live_at = time.time()
        with self._guard:
            self._wait(self._forget(unused))
        self._unused += unused
        return ready - started, took, took, live_at

    def _made(self, name: str, source: Path, deltas: Sequence[Path], digest: str, label: str) -> Version:
        """Write a version to a folder of its own, and load it."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        try:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            state = map_bits(folder / ADAPTER, "r+")
            for path in deltas:
                apply_delta(state, path)
            if (found := to_hex(state_digest(state))) != digest:
                raise EngineError(
                    f"{name} has digest {found}, but {digest} was published; it is not served",
                    CodecError.kind,
                )
            number = self._models.lora_id_counter.inc(1)
            own = f"{name}.{number}" if name in self._alive else name
            version = Version(lora_name=own, lora_int_id=number, lora_path=str(folder))
            version.label = label
            version.digest = digest
            self._wait(self._load(version))
        except BaseException:
            shutil.rmtree(folder)
            raise
        self._alive[name] = version
        weakref.finalize(version, self._unused_now, number, folder).atexit = False
        return version

    async def _load(self, version: Version) -> None:
        """Load a version. Runs in the server's event loop, as all that uses `_models`."""
        name = version.lora_name
        number = version.lora_int_id
        try:
            await self._client.add_lora(version)
            self._require_fit(name, await self._call("fits", adapter=number))
        except Exception as error:
            with suppress(Exception):  # a part of it may be loaded
                await self._client.remove_lora(number)
            if isinstance(error, EngineError):
                raise
            why = next(iter(str(error).strip().splitlines()[-1:]), type(error).__name__)
            problem = f"vLLM does not load {name} ({why})"
            if "ValueError" in why:  # so vLLM says that an adapter does not fit
                raise EngineError(f"{problem}: {_BASE}", RouteError.kind) from None
            raise EngineError(problem) from None

    async def _answer_with(self, name: str, version: Version) -> None:
        """Let a loaded version answer later requests, as `name` and as the newest one."""
        known = self._models.lora_requests
        self._served.pop(name, None)
        self._served[name] = version
        known[name] = version
        known[self._name] = version
        while len(self._served) > self._room():
            oldest = next(iter(self._served))
            del self._served[oldest]
            del known[oldest]

    def _unused_now(self, number: int, folder: Path) -> None:
        self._unused.append((number, folder))

    async def _forget(self, unused: list[tuple[int, Path]]) -> None:
        """Unload versions that no request needed before vLLM loaded another. vLLM handles calls in order, so
        by now it has stopped requests that clients gave up."""
        while unused:
            number, folder = unused[0]
            await self._client.remove_lora(number)
            shutil.rmtree(folder, ignore_errors=True)
            del unused[0]

    def _room(self) -> int:
        """How many versions are served by their names: those that vLLM keeps in memory."""
        others = [each for each in self._models.lora_requests.values() if not isinstance(each, Version)]
        return max(1, int(self._client.vllm_config.lora_config.max_cpu_loras) - len(others))

    def _require_fit(self, name: str, answers: list[dict[str, Any]]) -> None:
        """Raise `EngineError` unless each layer of an adapter found its place, of the right shape. With
        pipeline parallelism, each worker has a part of the layers."""
        nowhere = set.intersection(*(set(answer["unplaced"]) for answer in answers))
        misfits = [answer["misfit"] for answer in answers if answer["misfit"]]
        if nowhere:
            misfits.append(f"{min(nowhere)}: vLLM applies no adapter to it")
        if misfits:
            raise EngineError(
                f"{name} does not fit the model that vLLM serves ({misfits[0]}): {_BASE}", RouteError.kind
            )


def fits(worker: Any, adapter: int) -> dict[str, Any]:
    """Compare an adapter that a worker has loaded with the worker's layers.

    vLLM accepts an adapter of a smaller model, and drops layers that it does not find. The plugin's method of
    a worker calls this function for `op="fits"`.

    Returns:
        "unplaced": the adapter's layers that this worker has not. "misfit": says which layer has another
        shape; "" if none has.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    unplaced = []
    misfit = ""
    for name, weights in manager.get_adapter(adapter).loras.items():
        if name not in manager.modules:
            unplaced.append(name)
            continue
        inputs, outputs = _sizes(manager.modules[name])
        several = isinstance(weights.lora_a, list)
        left = weights.lora_a if several else [weights.lora_a]
        right = weights.lora_b if several else [weights.lora_b]
        found = [None if each is None else int(each.shape[0]) for each in right]
        if len(found) != len(outputs):
            found = [sum(size or 0 for size in found)]
            outputs = [sum(outputs)]
        same = all(size in (None, wanted) for size, wanted in zip(found, outputs, strict=True))
        columns = {int(each.shape[1]) for each in left if each is not None}
        if not misfit and not (same and columns == {inputs}):
            misfit = (
                f"{name} has {inputs} inputs and {outputs} outputs, but the adapter {[*columns]} and {found}"
            )
    return {"unplaced": unplaced, "misfit": misfit}


def _sizes(module: Any) -> tuple[int, list[int]]:
    """The number of inputs of one of vLLM's layers, and of outputs of each of its parts, of all ranks."""
    layer = module.base_layer
    if isinstance(module, LogitsProcessorWithLoRA):
        return int(module.hidden_size), [int(layer.vocab_size)]
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return int(layer.org_vocab_size), [int(layer.embedding_dim)]
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        heads = (layer.total_num_heads, layer.head_size), (keys, layer.head_size), (keys, layer.v_head_size)
        return int(layer.input_size), [int(count * size) for count, size in heads]
    if isinstance(layer, LinearBase):
        return int(layer.input_size), [int(n) for n in getattr(layer, "output_sizes", [layer.output_size])]
    raise RouteError(
        f"vLLM has a {type(layer).__name__} where the adapter has a layer, and nothing compares the two:"
        " adapt linear layers only"
    )
