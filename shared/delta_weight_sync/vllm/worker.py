"""A worker's half of a sync: stage a version while vLLM generates, commit it between two of its steps.

The plugin gives every vLLM worker one method, which the follower calls on all of them by `collective_rpc`:

    delta_weight_sync(op="warm")                               -> {"done"}    begins to compile, in a thread
    delta_weight_sync(op="learn", shapes={...}, dtypes={...})  -> {"digest"}  of the live weights; "drafts"
    delta_weight_sync(op="stage", deltas=[...])                -> {"done"}    begins to stage, in a thread
    delta_weight_sync(op="stage", checkpoint="folder")         -> {"done"}    stages what differs from it
    delta_weight_sync(op="staged")                             -> {"done", "stage_s"}  also after "warm"
    delta_weight_sync(op="commit", digest=..., label=...)      -> {"commit_s", "waited_s", "live_at"}

If the worker is in the engine's process, `_step_commit` does the last three by one call.

Answers are plain data, as in all messages of vLLM. {"error", "kind"} reports a failure. Staging computes the
digest that the changes lead to. If this digest is wrong, the commit writes nothing. A commit that fails on
any worker is undone bit for bit on all workers. `waited_s` is how long a commit waited for the step that was
under way; neither `commit_s` nor the pause that `_step_commit` measures contains this time. `live_at` is the
moment at which all workers had written, as this host's unix time.

A commit reads back what it wrote in place. To notice other code that writes to the live parameters, a thread
of the worker hashes them again, slice after slice, all of them within `RECHECK_S`. If a hash differs, the
worker refuses the next stage. The follower then repairs the weights by a join.

A tensor has no route (see `routes`) if vLLM's loader computes with it instead of copying it. A commit cannot
patch such a tensor in place. So if a commit changes one such tensor, it loads all such tensors by vLLM's own
loader, from a copy on the host.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download

from delta_weight_sync import checkpoint, codec, errors, gpu
from delta_weight_sync.codec import Bits, Patch, cut
from delta_weight_sync.collectives import all_to_all
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.util import Guard, SafeLogger
from delta_weight_sync.vllm import NO_SLEEP, cpu, memory, routes
from delta_weight_sync.vllm.drafts import Draft
from delta_weight_sync.vllm.memory import Changes, HostMemory, Memory, Step, Table
from delta_weight_sync.vllm.routes import Dtypes, Geometry, Learned, Piece, Route, Shapes

_TIMEOUT = timedelta(seconds=120)
RECHECK_S = 60.0  # time in which all parameters are hashed again
_MANY = 1 << 20  # from this number of changes on, workers share the decoding (encoding `fast`)
_BATCH = 1 << 25  # elements of a batch that is compared with a checkpoint; some batches have up to twice this
_log = SafeLogger()

Answer = dict[str, Any]


class Ranks:
    """The workers of an engine, seen from one of them. All must construct their `Ranks` at the same time.
    Staging runs in a thread next to vLLM's own collectives, so staging needs its own process group."""

    def __init__(self, world_size: int) -> None:
        self.size = world_size
        self.rank = dist.get_rank() if world_size > 1 else 0
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if world_size > 1 else None
        self._near, hosts = self._group, self.gather(socket.gethostname())
        if len(by_host := [[i for i in range(world_size) if hosts[i] == host] for host in {*hosts}]) > 1:
            self._near, _ = dist.new_subgroups_by_enumeration(
                sorted(by_host), timeout=_TIMEOUT, backend="gloo"
            )
        self.near = next(ranks for ranks in by_host if self.rank in ranks)  # ranks of this host's workers
        self.place = self.near.index(self.rank)  # index of this worker in `near`

    def gather(self, mine: Any, *, near: bool = False) -> list[Any]:
        """Return `mine` (plain data) of every worker, by rank. With `near`, of every worker on this host."""
        group, size = (self._near, len(self.near)) if near else (self._group, self.size)
        everyone = [mine] * size
        if group is not None:
            dist.all_gather_object(everyone, mine, group=group)
        return everyone

    def all_to_all(self, found: Sequence[Changes]) -> Changes:
        """Send `found[i]` to the i-th worker in `near`. Returns all changes that this worker was sent."""
        sizes = self.gather([(c.rows.size, c.element.size) for c in found], near=True)
        coming = [sent[self.place] for sent in sizes]
        # The first two arrays of `Changes` have an item per table row, and the other two an item per change.
        columns = zip(zip(*found, strict=True), (0, 0, 1, 1), strict=True)
        return Changes(
            *(all_to_all(each, [size[which] for size in coming], self._near) for each, which in columns)
        )

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Join all workers' parts (int16) on the host. Each element is zero on all workers but one."""
        if self._group is None:
            return part.cpu()
        together = part.cpu().clone()
        # gloo cannot add int16. Bytes give the same sum, because all workers but one add zero.
        dist.all_reduce(together.view(torch.uint8), group=self._group)
        return together

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If the block raises an exception on any worker, raise `WorkerError` on all other workers."""
        try:
            yield
        except BaseException as error:
            self.gather(f"rank {self.rank}: {_failed(error)['error']}")
            raise
        if failures := [failure for failure in self.gather("") if failure]:
            raise errors.WorkerError(failures[0])


class Fallback:
    """The host's copy of all tensors without a route; the same on every rank.

    `bits`: checkpoint name -> the words of the current tensor. Only a staged `Step` changes `bits`. `dtypes`:
    the dtype of those that are not BF16.
    """

    def __init__(
        self, model: torch.nn.Module, bits: Mapping[str, Bits], dtypes: Mapping[str, str] | None = None
    ) -> None:
        """Prove that reloading works: load `bits`, which vLLM has loaded already, into `model` again.
        Raises `RouteError` if that fails or changes the model. The model is then damaged: do not serve it."""
        self._model = model
        self.bits = dict(bits)
        self._dtypes = dtypes or {}
        if not bits:
            return
        before = self._fingerprints()
        names = ", ".join(self.bits)
        try:
            self._load()
        except Exception as error:
            raise errors.RouteError(f"vLLM cannot reload {names} ({error!r}): serve another model") from error
        if changed := [name for name, bits in self._fingerprints().items() if bits != before[name]]:
            raise errors.RouteError(f"loading {names} again changed {changed[0]}: serve another model")

    def stage(self, patches: Sequence[Patch]) -> tuple[Step, int]:
        """Return the step that loads the patched tensors, and how the digest changes (equal on all ranks)."""
        old = {patch.name: self.bits[patch.name] for patch in patches}
        new = {name: bits.copy() for name, bits in old.items()}
        for patch in patches:
            codec.apply(patch, new[patch.name])
        return Step(lambda: self._write(new), lambda: self._write(old)), state_digest(new) - state_digest(old)

    def _write(self, tensors: Mapping[str, Bits]) -> tuple[int, float]:
        """Replace `tensors` in the copy and load all of the copy. Computed weights are not read back."""
        self.bits |= tensors
        if tensors:
            self._load()
        return 0, 0.0

    def _load(self) -> None:
        """Load copies of all tensors in one call, because a loader may combine or change them."""
        kinds = self._dtypes
        tensors = ((n, checkpoint.to_tensor(bits, kinds.get(n, "BF16"))) for n, bits in self.bits.items())
        with torch.no_grad():
            self._model.load_weights(tensors)  # type: ignore[operator]

    def _fingerprints(self) -> dict[str, routes.Fingerprint]:
        """The fingerprint of each floating-point tensor of the model."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: routes.fingerprint(tensor) for name, tensor in tensors if tensor.is_floating_point()}


class Staged(NamedTuple):
    """A commit that is ready. `digest` is that of the live parameters after all `steps`."""

    digest: int = 0
    steps: Sequence[Step] = ()


class LiveWeights:
    """The checkpoint's tensors as they are in this worker's memory."""

    def __init__(
        self, routes: dict[str, Route], owned: dict[str, tuple[int, ...]], fallback: Fallback, ranks: Ranks
    ) -> None:
        """`owned`: for each tensor, the indices of the pieces that this worker adds to the digest."""
        self._routes = routes
        self._owned = owned
        self._fallback = fallback
        self._ranks = ranks
        kept = {name: bits.shape for name, bits in fallback.bits.items()}
        self.shapes = {name: routes[name].shape for name in owned} | kept
        with ranks.fail_together():
            self._table = own = Table(routes, owned)
            self.memory = memory_of(own)
        everyone = ranks.gather((own.rows, own.starts))
        self._tables = [copy(own) for _ in ranks.near]  # of the workers on this host, only for `find`
        for table, rank in zip(self._tables, ranks.near, strict=True):
            table.rows, table.starts = everyone[rank]

    def recheck(self) -> None:
        """Hash a part of the live parameters again; see `Memory.recheck`."""
        self.memory.recheck()

    def digest(self, *, known: bool = False) -> int:
        """Digest of the live parameters of all workers. `known`: without reading them again."""
        with self._ranks.fail_together():
            mine = self.memory.known_digest() if known else self.memory.digest()
        return int(sum(self._ranks.gather(mine), state_digest(self._fallback.bits))) % (1 << 64)

    def bits(self, name: str) -> Bits:
        """One whole checkpoint tensor, on the host. All workers must call this for the same tensor."""
        if name in self._fallback.bits:
            return self._fallback.bits[name]
        part = self._routes[name].read(self._owned[name])
        return self._ranks.whole(part).numpy().view(np.uint16).reshape(self.shapes[name])

    def stage(self, paths: Sequence[Path], known: int) -> Staged:
        """Prepare to commit delta files, in this order. `known`: the digest that the weights must still have.
        Raises `CodecError` if the files do not fit, `WeightsChangedError` if the weights' digest differs."""
        if (live := self.digest(known=True)) != known:
            raise errors.WeightsChangedError(
                f"something else changed the live weights: digest {live:016x}, not {known:016x}"
            )
        ranks = self._ranks
        kept = self._fallback.bits
        with ranks.fail_together():
            deltas = [codec.Delta(path) for path in paths]
            # The workers of a host can divide the decoding, and then exchange the changes that they found.
            # Different hosts do not exchange them, because found changes take five times the file's bytes.
            # Every worker decodes everything in three cases: there are too few changes; or decoding needs old
            # bits (all workers must call `self.bits` for the same tensors); or the files are of several
            # versions (`codec.merged` cannot divide these).
            divisible = len({d.version for d in deltas}) == 1 and not any(d.reads_old for d in deltas)
            divided = divisible and sum(delta.changes for delta in deltas) >= _MANY
            tables = self._tables if divided else [self._table]  # of the workers that decode together
            share = ranks.place % len(tables), len(tables)
            decoded = [*codec.merged(deltas, self.shapes, self.bits, share)]
            found = memory.find(decoded, tables)
            reloaded = [p for part in decoded if kept for p in part.patches(self.shapes) if p.name in kept]
        if len(tables) > 1:
            found = [ranks.all_to_all(found)]
            reloaded = [*chain(*ranks.gather(reloaded, near=True))] if kept else []
        return self._staged(found, reloaded, live)

    def stage_checkpoint(self, folder: Path) -> Staged:
        """Prepare to write whatever differs from the checkpoint in `folder`."""
        with self._ranks.fail_together():
            # "r+", although nothing is written: numba would compile kernels again for read-only arrays.
            wanted = checkpoint.map_folder(folder, "r+")
            patches = (codec.diff(name, bits, wanted[name]) for name, bits in self._fallback.bits.items())
            reloaded = [patch for patch in patches if patch.index.size]
        return self._staged(self._differences(wanted), reloaded, self.digest())

    def _differences(self, wanted: dict[str, Bits]) -> Iterator[Changes]:
        """Yield how this worker's parameters differ from a checkpoint. The rows of the table are cut into
        blocks. Each block yields one item, and each read takes a batch of blocks."""
        names = np.repeat([*self._table.number], np.diff(self._table.starts[:-1])).tolist()
        blocks = cut(self._table.parts, _BATCH)
        batches = np.flatnonzero(np.diff(blocks[:, 2].cumsum() // _BATCH)) + 1
        for batch in np.split(blocks, batches):
            live = self.memory.read(batch)
            for (row, first, count), end in zip(batch.tolist(), batch[:, 2].cumsum(), strict=True):
                theirs = memory.part_of(self._table.rows[row], wanted[names[row]])[first : first + count]
                index, ulps = codec.diff_flat(live[end - count : end], theirs, first)
                yield Changes(np.array([row]), np.array([index.size]), index.astype(np.int32), ulps)

    def _staged(self, found: Iterable[Changes], reloaded: list[Patch], live: int) -> Staged:
        with self._ranks.fail_together():
            write, own_change = self.memory.prepare(Changes.joined(found))  # how the digest changes
            reload, common_change = self._fallback.stage(reloaded)
        digest = sum(self._ranks.gather(own_change), live + common_change) % (1 << 64)
        return Staged(digest, [reload, write])


def memory_of(table: Table) -> Memory:
    """The object that reads and writes the parameters of `table`, on their device."""
    if table.device.type == "cpu":
        return HostMemory(table)
    from delta_weight_sync.vllm.gpu import DeviceMemory  # needed only with a GPU

    return DeviceMemory(table)


def warm_up(device: torch.device) -> Staged:
    """Compile or load all that a replica runs, on a small tensor."""
    whole = Geometry(0, (9001,), (1,))
    piece = Piece(torch.zeros(whole.sizes, dtype=torch.int16, device=device), whole, whole)
    live = memory_of(Table({"w": Route(whole.sizes, (piece,))}, {"w": (0,)}))
    live.digest()
    row = np.zeros(1, np.int64)
    one = np.ones(1, np.int64)
    write, _ = live.prepare(Changes(row, one, np.zeros(1, np.int32), np.zeros(1, np.uint16)))
    write.do()
    write.undo()
    live.read(np.stack([row, row, one], 1))
    return Staged()


def commit(steps: Sequence[Step], ranks: Ranks) -> float:
    """Write and check; if anything fails here or on another worker, undo everything and raise. Returns how
    many seconds the writes waited for earlier work on the device."""
    done: list[Step] = []
    waited_s = 0.0
    wrong = 0
    try:
        with ranks.fail_together():
            for step in steps:
                done.append(step)  # before it is written: half a write is undone as well
                missed, waited = step.do()
                wrong += missed
                waited_s += waited
            if wrong:
                raise errors.CodecError(f"{wrong} elements read back differently from what was written")
    except BaseException:
        for step in reversed(done):
            step.undo()
        raise
    return waited_s


class DeltaWorker:
    """What one vLLM worker keeps between two calls of the plugin's method."""

    weights: LiveWeights  # from the first `learn` on
    _draft: Draft | None = None

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's worker, with a loaded model. All workers must do this at the same time."""
        config = worker.vllm_config
        if reason := _unsupported(config):
            raise errors.RouteError(reason)
        self._model = worker.get_model()
        self._draft = Draft(worker) if config.speculative_config else None
        self._config = config
        if self._device.type == "cpu":
            cpu.self_test(self._model)
        self._ranks = Ranks(config.parallel_config.world_size)
        self._staged = Staged()
        self._digest = 0
        self.staging: Future[Answer] = Future()  # the answer to "staged"
        self._rechecks: Thread | None = None

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def warm(self) -> Answer:
        """Begin to compile what stages and commits run, while vLLM generates; `learn` would compile it while
        vLLM waits. On a GPU, this loads torch's own kernels."""
        return self._begin("warm", partial(warm_up, self._device))

    def learn(self, shapes: dict[str, list[int]], dtypes: dict[str, str] | None = None) -> Answer:
        """Learn where the tensors of a run are in the model's parameters.

        `shapes`: checkpoint name -> shape of the tensor's words; `dtypes`: the dtype of those that are not
            BF16.
        """
        dtypes = dtypes or {}
        if again := hasattr(self, "weights"):  # perhaps after a timeout, which makes gloo's groups unusable
            self._ranks = Ranks(self._ranks.size)
        with self._ranks.fail_together():
            learned = self._find(shapes, dtypes)
        owned, unroutable = routes.ownership(shapes, self._ranks.gather(learned.sources))
        for name, reason in unroutable.items():
            _log.warning("%s cannot be patched in place (%s): commits that change it are slow", name, reason)
        kept: dict[str, Bits] = {}
        with self._ranks.fail_together():
            if unroutable:  # read what vLLM loaded
                kept = dict(self._loaded(unroutable, shapes, dtypes))
                if again:  # commits may have changed what vLLM loaded
                    kept |= {name: bits for name, bits in self.weights._fallback.bits.items() if name in kept}
            fallback = Fallback(self._model, kept, dtypes)
        self.weights = self._weights(learned.routes, owned[self._ranks.rank], fallback)
        self._staged, self._digest = Staged(), self.weights.digest()
        if not self._rechecks:
            self._rechecks = rechecks(weakref.ref(self))
        answer: Answer = {"digest": to_hex(self._digest)}
        if self._draft:
            answer["drafts"] = {"method": self._draft.method, "kept": self._draft.kept}
        return answer

    def _find(self, shapes: Shapes, dtypes: Dtypes) -> Learned:
        learned = routes.learn(self._model, shapes, dtypes)
        return self._draft.follow(learned, self._model, shapes, dtypes) if self._draft else learned

    def _weights(
        self, routes: dict[str, Route], owned: dict[str, tuple[int, ...]], fallback: Fallback
    ) -> LiveWeights:
        return LiveWeights(routes, owned, fallback, self._ranks)

    def _loaded(
        self, reasons: Mapping[str, str], shapes: Shapes, dtypes: Dtypes
    ) -> Iterator[tuple[str, Bits]]:
        """Read tensors from the checkpoint that vLLM loaded: a folder, or a model in the Hub's local cache.

        `reasons`: name -> why it is read. Raises `RouteError` if the checkpoint lacks one, because then its
        digest is unknown.
        """
        model = self._config.model_config
        cache = self._config.load_config.download_dir
        if not (folder := Path(model.model)).is_dir():
            place: dict[str, Any] = {"revision": model.revision, "cache_dir": cache}
            folder = Path(snapshot_download(model.model, **place, local_files_only=True))
        loaded = checkpoint.Checkpoint(folder)
        for name, reason in reasons.items():
            dtype = dtypes.get(name, "BF16")
            spec = loaded.specs.get(name)
            if spec is None or checkpoint.words_shape(dtype, spec.shape) != tuple(shapes[name]):
                raise errors.RouteError(
                    f"{name}: {reason}, and the checkpoint that vLLM loaded has no such tensor: start vLLM"
                    " with the run's own model, which `delta-weight-sync checkout` writes"
                )
            yield name, loaded.read(name, dtype)

    def stage(self, deltas: Sequence[str] = (), checkpoint: str = "") -> Answer:
        """Begin to prepare a commit: of delta files in order, or of what differs from a checkpoint."""
        if checkpoint:
            return self._begin("stage", partial(self.weights.stage_checkpoint, Path(checkpoint)))
        return self._begin("stage", partial(self.weights.stage, [*map(Path, deltas)], self._digest))

    def _begin(self, name: str, work: Callable[[], Staged]) -> Answer:
        self._staged = Staged()
        self.staging = Future()
        Thread(target=self._stage, args=(work, self.staging), name=name, daemon=True).start()
        return {"done": False}

    def _stage(self, work: Callable[[], Staged], staging: Future[Answer]) -> None:
        started = time.perf_counter()
        try:
            with gpu.on(self._device):  # in a new thread, device 0 is the current one
                self._staged = work()
            answer: Answer = {"done": True, "stage_s": time.perf_counter() - started}
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = _failed(error)
        staging.set_result(answer)

    def staged(self) -> Answer:
        """Whether staging has ended, and how long it took."""
        return self.staging.result() if self.staging.done() else {"done": False}

    @torch.no_grad()
    def commit(self, digest: str, label: str) -> Answer:
        """Write the staged changes if they lead to `digest`. `label` is for `_step_commit`, unused here."""
        started = time.perf_counter()
        staged = self._staged
        self._staged = Staged()
        if to_hex(staged.digest) != digest:
            raise errors.CodecError(
                f"the staged changes give digest {to_hex(staged.digest)}, but the published one is {digest}"
            )
        waited_s = commit(staged.steps, self._ranks)
        self._digest = staged.digest
        took_s = time.perf_counter() - started
        return {"commit_s": took_s - waited_s, "waited_s": waited_s, "live_at": time.time()}


def rechecks(of: weakref.ref[Any]) -> Thread:
    """Start a thread that hashes the `weights` of an object again and again, as long as the object exists."""

    def recheck() -> None:
        guard = Guard("the search for foreign writes to the weights")
        while worker := of():
            with guard, suppress(torch.OutOfMemoryError):  # the engine may need all of a GPU for a moment
                worker.weights.recheck()
            del worker
            # One tenth of `RECHECK_S` remains for hashing, and for repeating slices that a commit disturbed.
            time.sleep(0.9 * RECHECK_S / memory.SLICES)

    thread = Thread(target=recheck, name="recheck", daemon=True)
    thread.start()
    return thread


def _unsupported(config: Any) -> str:
    """Which of vLLM's settings rules out commits, and the fix; "" if none does."""
    parallel = config.parallel_config
    without = "; start vLLM without it"
    reasons = {
        # vLLM sets this value to 1 in the engines of a model that is not a mixture of experts.
        "a mixture of experts with --data-parallel-size cannot take commits, because its engines compute each"
        " step together; start one replica for each engine instead": parallel.data_parallel_size != 1,
        "--enable-eplb moves experts away from where deltas go" + without: parallel.enable_eplb,
        "--enable-lora wraps layers, so deltas do not find their weights; publish merged weights, and start"
        " vLLM without it": config.lora_config is not None,
        NO_SLEEP: config.model_config.enable_sleep_mode,
        "--offload-group-size moves weights while vLLM runs"
        + without: config.offload_config.prefetch.offload_group_size > 0,
    }
    return next((reason for reason, found in reasons.items() if found), "")


def call(worker: Any, op: str, make: Callable[[Any], DeltaWorker] = DeltaWorker, **arguments: Any) -> Answer:
    """The method that the plugin adds to vLLM's worker class; it returns errors as answers. `make` makes the
    worker's `DeltaWorker` at the first call."""
    try:
        if op in ("warm", "learn") and not hasattr(worker, "_delta_worker"):
            worker._delta_worker = make(worker)
        answer: Answer = getattr(worker._delta_worker, op)(**arguments)
    except Exception as error:  # noqa: BLE001 - it is the answer
        return _failed(error)
    return answer


def _failed(error: BaseException) -> Answer:
    """The answer for an error. If another library raised it, its type precedes the message."""
    if isinstance(error, errors.DeltaWeightSyncError):
        return {"error": f"{error}", "kind": error.kind}
    return {"error": f"{type(error).__name__}: {error}", "kind": "unexpected"}
