"""Publishes the weights of a training loop, of one process or several, as versions in a bucket."""

import contextlib
import logging
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from delta_weight_sync import errors
from delta_weight_sync.checkpoint import Bits, Spec, Specs, dtype_of
from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import tensor_digest, to_hex
from delta_weight_sync.publish import arguments, lora, restarts
from delta_weight_sync.publish.adapters import Merged, adapted, unwrapped
from delta_weight_sync.publish.base import MERGED, PEFT, Base
from delta_weight_sync.publish.hub_copy import HubCopy
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.publish.names import Names, find_names, plain_name
from delta_weight_sync.publish.outbox import Outbox, RepeatedSyncs
from delta_weight_sync.publish.plan import HALF, Plan
from delta_weight_sync.publish.readable import require_readable
from delta_weight_sync.publish.reports import Listener
from delta_weight_sync.publish.sharding import Held, Peers, Weights, gathered, local, own_digest
from delta_weight_sync.publish.state_contents import Groups, groups_of, snapshot
from delta_weight_sync.publish.states import FoundState, StateRecord, StateSaver, extra_as_json, find_state
from delta_weight_sync.publish.undo import UndoLog
from delta_weight_sync.publish.writer import PartWriter, RunWriter
from delta_weight_sync.reader import RunReader, split_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import METRICS, RunLogWriter, StepEvent, finite
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import SIGNING_KEY, writer_keys
from delta_weight_sync.store import open_bucket
from delta_weight_sync.util import Guard

__all__ = ["Publisher", "checkpoint_weights"]
DEFAULT_RUN = "main"
Model = torch.nn.Module | Merged | lora.Adapter | Weights | Mapping[str, torch.Tensor]
_TIMEOUT_S = 600.0
_log = logging.getLogger("delta_weight_sync")


class Publisher:
    """Publishes a model's weights as versions of one run; only the changed weights are uploaded.

        with Publisher("hf://buckets/me/wordle#first", base="Qwen/Qwen3-0.6B") as publisher:
            for step in range(100):
                ...
                publisher.publish(model, step)

    If `torch.distributed` is initialized, create a `Publisher` on every rank, and call the same methods in
    the same order on all of them. Parameters may be sharded with FSDP2. Each rank keeps, encodes and uploads
    its share of the tensors; a version exists when rank 0, the main rank, has written HEAD. An error on one
    rank is raised on that rank, and as a `PeerError` on all other ranks.

    Opening the run fences off any other writer. An existing run continues from its newest version. If a
    trainer resumes no state and starts with the weights of version 0, its first `publish` raises an error,
    because replicas would take the untrained weights for new ones.

    Args:
        url: URL of the bucket, then `#` and the run's name ("main" by default). A missing bucket is created.
        base: The checkpoint from which the policy was loaded: a folder, or a model's id on the Hub. A new run
            takes config, tokenizer and untrained weights from this checkpoint. Versions have its tensors,
            under their names and in their dtypes there. Leave it out with `adapter`.
        encoding: Encoding of deltas, "fast" or "small"; see `delta_weight_sync.codec`.
        adapter: Publish the LoRA adapter of a PEFT model, not the merged weights. A version then is a folder
            as PEFT saves it, in 16 bits. A replica serves its own base with the adapter, so the trainer's
            base may be quantized.
        mirror: Which memory holds the newest sync's bf16 bits: "host", or "device" for parameters on a GPU.
        keep: How much of the run stays in the bucket, such as "20GB" or "7d"; by default all of it.
        allow_nonfinite: Publish NaN and infinite weights; by default they are an error.
        trust_remote_code: Put the Python code of `base` into every version, for a model that transformers
            does not know. Replicas then need --trust-remote-code. By default, such a base is refused.
        state_minutes: Least minutes between two saved states, 5 by default. After a slow upload the pause is
            longer, so that uploads of states take at most a tenth of the time. 0: no pause.
        signing_key: The key that signs every version, or the file that `delta-weight-sync keygen` wrote. By
            default the key in DELTA_WEIGHT_SYNC_SIGNING_KEY, if that is set.
        on_version: Called on the main rank with the manifest of each published version: in order, on a
            thread of its own, so publishing does not wait for it. An exception in it is logged once. `close`
            waits up to 5 s for the calls that are left; those that have not begun by then are left out.
        fresh: Let an existing run start again with the weights of version 0.
        peers: The ranks that publish together, by default all.

    Attributes:
        sync: The number of the newest sync. Each call of `publish` is one sync.
        reader: Reads the run that is published.
        log: The run's log; None on ranks other than the main one.
        resumed_from: The state that `find_state` or `restore` found.

    Raises:
        ConfigError: An argument has a value that is not allowed.
        CheckpointError: `base` is missing or is not a checkpoint.
        BucketError, ProtocolError: The bucket or the run cannot be used.
        FencedError: Another trainer opened the run at the same moment.
    """

    def __init__(
        self,
        url: str,
        base: str | Path | None = None,
        *,
        encoding: Encoding = "fast",
        adapter: bool = False,
        mirror: Place = "host",
        keep: str | None = None,
        allow_nonfinite: bool = False,
        trust_remote_code: bool = False,
        state_minutes: float = 5.0,
        signing_key: str | Path | None = None,
        on_version: Callable[[Manifest], object] | None = None,
        fresh: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self.sync = 0
        self.resumed_from: StateRecord | None = None
        self.log: RunLogWriter | None = None
        self._metrics_guard = Guard("logging the metrics of the training loop")
        self._writer: RunWriter | None = None
        self._begun = False  # whether `publish` was called
        self._closed = False
        self._has_version = False  # whether the run has a version, or will have one; the same on all ranks
        self._fresh = fresh
        self._found: FoundState | None = None
        self._given: Groups | None = None  # the optimizer's groups before training, if they are known
        self._adapter = adapter
        self._config: Mapping[str, Any] | None = None  # of the adapter that was published last
        self._start: Base | None = None  # only on the main rank
        self._assets: Path | None = None  # folder with the small files of `_start`
        self._plan: Plan | None = None  # made when the first weights come
        self._rounding_known = False  # whether `_named` has said which tensors are rounded
        self._peers = peers or Peers()
        self._resources = contextlib.ExitStack()
        with self._peers.fail_together():
            kept = arguments.check(
                url,
                base,
                adapter=adapter,
                encoding=encoding,
                mirror=mirror,
                keep=keep,
                state_minutes=state_minutes,
                on_version=on_version,
            )
            if self._peers.main:
                self._open(url, base, trust_remote_code, signing_key, on_version)
        # If this body fails on any rank, `stack` closes what `_open` and the body have opened on this rank.
        with contextlib.ExitStack() as stack, self._peers.fail_together():
            stack.push(self._resources.pop_all())
            # Rank 0 sends all ranks its identity as a writer, and the newest manifest.
            opened = self._peers.exchange(self._writer and (self._writer.writer, self._writer.newest))[0]
            self._continued: Manifest | None = opened[1]
            self._has_version = self._continued is not None
            if not self._writer:
                (place, run) = split_run(url)
                (_, trusted) = writer_keys(signing_key)
                self.reader = RunReader(open_bucket(place), run or DEFAULT_RUN, trusted)
            writer = self._writer or PartWriter(self.reader, *opened)
            writer.part = f".r{self._peers.rank}" if self._peers.size > 1 else ""
            self._outbox = Outbox(
                writer,
                self.log,
                peers=self._peers,
                encoding=encoding,
                mirror=mirror,
                untrained=self._untrained if self._start else None,
                hub_copy=HubCopy(self._start, self._writer) if self._start and self._writer else None,
                keep=kept,
                finite=not allow_nonfinite,
                adapter=adapter,
            )
            stack.enter_context(contextlib.closing(self._outbox))
            # The thread that uploads states gets its own process group: threads must not share collectives.
            state_peers = Peers(alone=self._peers.size == 1)
            self._saver = StateSaver(self.reader, state_peers, self._outbox, self._writer, 60 * state_minutes)
            self._resources = stack.pop_all()

    def __repr__(self) -> str:
        version = "no version yet" if self._outbox.version is None else f"version {self._outbox.version}"
        place = f"{self.reader.bucket.url}#{self.reader.keys.run}"
        return f"<Publisher of {place}: {version}, sync {self.sync}{', closed' * self._closed}>"

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which writes manifests and HEAD."""
        return self._peers.main

    @property
    def writer_term(self) -> int:
        """This trainer's term, higher than those of earlier trainers; 0 on every rank but the main one."""
        return self._writer.writer.term if self._writer else 0

    @property
    def state_failure(self) -> Exception | None:
        """Why the newest upload of a state failed; None if it did not fail."""
        return self._saver.failure

    @property
    def repeated_sync(self) -> int:
        """The newest sync of an earlier trainer that this trainer has made again, with the same bits.

        Such a sync is not published twice. At first, the value is the sync of the resumed state.
        """
        return self._outbox.repeated.newest

    def publish_base(self, weights: Model, step: int = 0) -> None:
        """Publish version 0 of a new run. If the run has versions, only check that the model is the same.

        Call this before you shard the model. All ranks must call it, but only the main rank needs the
        weights. A first `publish` of the same weights with the same `step` adds no version.

        Raises:
            CodecError: The run is of another model, or a weight cannot be published.
        """
        self._require_open()
        with self._peers.fail_together():
            weights = self._taken(weights) if self._peers.main or not self._adapter else {}
            step = arguments.whole_step(step, 0)
        plan = self._planned(weights)
        with self._peers.fail_together():
            if self._outbox.version is not None:
                # If the newest version could not be rebuilt, `shapes` is empty, and nothing is compared. Then
                # the first `publish`, which comes after any `restore`, uploads all weights.
                for name, tensor in self._named(weights, plan) if self._outbox.shapes else ():
                    for target in plan.targets(name, tensor):
                        self._outbox.require_same(target.name, target.words)
                return
            self._has_version = True
            self._outbox.publish_base(self._whole(weights, plan), step)
            self._outbox.repeated = RepeatedSyncs({step: self._outbox.digest})

    def publish(self, weights: Model, step: int | None = None) -> None:
        """Hand over the weights for a new version. Returns when the changes since the last sync are known.

        A background thread encodes and uploads these changes. Syncs that arrive during an upload become one
        version. Do not change the tensors before this call returns. A new run's first call stores
        version 0: it uploads all weights, unless the Hub can copy those of `base`.

        Args:
            weights: The model, which also gives its buffers; or `model.named_parameters()`, or another
                iterable or mapping of names and tensors. The names are those of the model or of the
                checkpoint. Each call must have the same names. Float tensors are rounded to the dtype that
                versions hold them in, usually bf16. A model with PEFT's LoRA adapters is published merged:
                `W + scale * B @ A`, computed in float64, rounded once. The base is only read. A publisher
                with `adapter` takes a `PeftModel` only, and publishes its active adapter.
            step: Number of this sync, stored in the version; by default the next one after the run's newest
                sync or the resumed state, and 1 in a new run. It must not fall.

        Raises:
            ConfigError: This publisher is closed, `weights` are no named tensors, or `step` falls. Or this
                is the first call for a run with later versions, and the weights are those of version 0.
            CheckpointError, CodecError: A tensor cannot be published exactly. The message names
                it and the fix.
            FencedError, AccessDeniedError: Another trainer took over, or the store denied access, in this
                call or in the background.
        """
        self._require_open()
        # The version after which a trainer that resumed no state publishes its first weights.
        earlier = None if self._begun or self.resumed_from else self._continued
        with self._peers.fail_together():
            weights = self._taken(weights)
            newest = self.sync if self._peers.main else 0  # only the main rank's steps count
            last = earlier.sync if earlier else self.sync
            sync = last + 1 if step is None else arguments.whole_step(step, newest)
        if earlier and earlier.version > 0 and not self._fresh:
            self._outbox.refused = self._refused(weights)
        plan = self._planned(weights)
        self.sync = sync
        self._has_version = True
        first = not self._begun
        self._begun = True  # only now: if a read fails above, the first weights are still to come
        parts = gathered(self._named(weights, plan), plan, self._outbox.owns, first=first)
        with self._peers.fail_together(parts):
            self._outbox.publish(parts, self.sync, first=first)
        if earlier and earlier.version > 0 and self._peers.main:
            with Guard("the search for the weights with which this trainer starts"):
                restarts.log_start(self.reader, earlier, self._outbox.digest)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write metrics of the training loop into the run's log, for the dashboard.

        Only finite numbers are logged, also those in tensors of one element; a failure is logged and stops
        nothing. If you log more than a tenth of the deltas' bytes, some calls are left out. The metric
        "reward" becomes the dashboard's reward. All ranks may call this; only rank 0's metrics are logged.

        Args:
            metrics: Name -> number. At most 256 of them are logged.
            step: Number of the step; by default, that of the newest sync.
        """
        if self.log is None:
            return
        with self._metrics_guard:
            named = ((str(name), finite(value)) for name, value in metrics.items())
            found = [(name, number) for name, number in named if number is not None]
            kept = dict(found[:METRICS])
            number = self.sync if step is None else step
            event = StepEvent(t=time.time(), step=number, reward=kept.get("reward"), metrics=kept)
            self.log.append(event, spare=True)

    def keep_undo_log(self, syncs: int) -> UndoLog:
        """Start a log that can undo the last `syncs` syncs. Call this after a `publish`.

        Raises:
            ConfigError: There are several ranks, and each knows only a part of the changes.
        """
        if self._peers.size > 1:
            raise errors.ConfigError("an undo log needs a trainer of one process: start a single one")
        self._outbox.undo_log = log = UndoLog(self.sync, syncs)
        return log

    def find_state(self) -> StateRecord | None:
        """Find the newest state to resume from; return it, and set `resumed_from` to it. None for a new run.

        If this trainer then repeats the syncs that the earlier trainer made after that state, these syncs
        are not published again. The first sync that differs is published. Every rank reads the bucket.

        Raises:
            StateError: The run has versions after version 0 but no state.
        """
        self._require_open()
        self._found = find_state(self.reader, self._outbox, self._peers, Scratch())
        self.resumed_from = self._found.record if self._found else None
        return self.resumed_from

    def restore(
        self, weights: Model, optimizer: torch.optim.Optimizer, **others: Stateful
    ) -> dict[str, Any] | None:
        """Resume from the newest state: put back what `save_state` saved, bit for bit.

        The state includes random numbers; a rank that the earlier trainer did not have gets a seed from rank
        0's numbers. Returns the `extra` of `save_state`. For a new run, returns None and changes nothing. If
        this fails, `weights` may be restored in part, and this trainer counts as one that resumed no state.

        Raises:
            StateError: The state is of another model or optimizer. Or the run has versions after version 0,
                but no state.
        """
        self._require_open()
        arguments.require_optimizer(optimizer)
        self._given = groups_of(optimizer)
        if self._found is None and self.find_state() is None:
            return None
        found = self._found
        self._found = None
        assert found is not None
        try:
            self._restore(found, weights, optimizer, others)
        except BaseException:
            self.resumed_from = None
            self._outbox.repeated = RepeatedSyncs({})
            raise
        self.sync = found.record.sync
        return found.record.extra

    def _restore(
        self,
        found: FoundState,
        weights: Model,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Stateful],
    ) -> None:
        """Put back the state `found`. Raises `StateError` unless its weights are those of its version."""
        live = self._trained(weights)
        found.restore(live, optimizer, others)
        # If the newest version is damaged, `shapes` is empty. The digest is then not checked, because it also
        # covers the untrained weights, which are unknown.
        published: Model = {}
        if self._outbox.shapes:
            has_adapters = self._adapter or (
                isinstance(weights, torch.nn.Module) and isinstance(adapted(weights), Merged)
            )
            again = isinstance(weights, torch.nn.Module | Mapping | ItemsView)
            published = weights if has_adapters else dict(self._published(weights if again else live))
        if published and self.digest(published) != found.record.digest:
            raise errors.StateError(
                f"the weights of this state are not those of its version {found.record.version}:"
                " start a new run, and call `save_state` right after each `publish`"
            )

    def save_state(
        self,
        weights: Model,
        optimizer: torch.optim.Optimizer,
        *,
        extra: dict[str, Any] | None = None,
        final: bool = False,
        **others: Stateful,
    ) -> bool:
        """Save everything that a trainer needs to resume from here. Call this right after each `publish`.

        Returns once the state is copied to the host. A background thread uploads the copy, after the version
        with the same weights. If this trainer resumed no state, the first call waits for the upload.

        Args:
            weights: Every tensor that training changes, under the same names as in `publish`. Of a model with
                PEFT's adapters, a state has the adapters but not the frozen base. Pass the model here if the
                publisher has `adapter`.
            optimizer: The optimizer; its state, such as moments, is saved.
            extra: Values of your own, such as the number of samples used: what JSON can hold, tuples, and
                other keys than text; up to 7 MiB as JSON.
            final: Save the state even if `state_minutes` have not passed, after the upload of an earlier one.
                Set this at the end of training.
            **others: Other objects with a state: learning rate schedule, gradient scaler.

        Returns:
            False if nothing is saved: the last state is younger than `state_minutes` or still being uploaded,
            or this trainer is repeating syncs that the bucket has.

        Raises:
            StateError: A value cannot be saved, or ranks have different moments, as with ZeRO.
            TimeoutError: With `final`, the upload of the earlier state takes longer than ten minutes.
            DeltaWeightSyncError: The first state could not be uploaded.
        """
        self._require_open()
        self._require_version()
        arguments.require_optimizer(optimizer)
        if final:
            with self._peers.fail_together():
                self._saver.wait(_TIMEOUT_S)
            self._outbox.release()
        ready = self._saver.ready(final=final) and (not self._peers.main or self._outbox.pin())
        if not all(self._peers.exchange(ready)):
            return False
        with self._peers.fail_together():
            if self._given is None and not optimizer.state:  # no step was made
                self._given = groups_of(optimizer)
            extra = extra_as_json(extra or {})  # a copy: the caller may change its own meanwhile
            state = snapshot(self._trained(weights), optimizer, others, self._peers, self._given)
        first = self.resumed_from is None and self._saver.thread is None
        self._saver.save(state, self.sync, extra)
        if first:
            self._saver.wait()  # a large state takes long, and the upload ends by itself if it fails
            if self._saver.failure:
                raise self._saver.failure
        return True

    def flush(self, timeout_s: float = _TIMEOUT_S) -> Manifest:
        """Wait until every sync is in the bucket, and no state is being uploaded.

        A failed upload of a state is only logged. Returns the newest manifest, on all ranks.

        Raises:
            TimeoutError: The syncs, or the state's upload after that, take longer than `timeout_s`.
            DeltaWeightSyncError: The background thread had failed with this error.
        """
        self._require_version()
        self._outbox.release()
        with self._peers.fail_together():
            newest = self._outbox.flush(timeout_s) if self._peers.main else None
            self._saver.wait(timeout_s)
        manifest: Manifest = self._peers.exchange(newest)[0]
        return manifest

    def digest(self, weights: Model) -> str:
        """The digest that a version with these weights, of all ranks, would have."""
        if self._adapter:
            weights = lora.adapter_of(weights)
        plan = self._planned(weights)
        own, names = own_digest(self._named(weights, plan), plan, self._outbox.owners, self._peers.rank)
        mirror = self._outbox.mirror  # also has the untrained weights
        own += sum(tensor_digest(name, mirror.bits(name)) for name in mirror.shapes.keys() - names)
        return to_hex(sum(self._peers.exchange(own)))

    def views(self, weights: Model) -> dict[str, torch.Tensor]:
        """The tensors of a version, by their names there, as views of the trainer's tensors or of a copy.

        `UndoLog.roll` takes them. Call this after a `publish`.

        Raises:
            CodecError: A tensor of the version is not a plain view, or is not held in bf16, or is tied to
                another.
        """
        if self._adapter:
            weights = lora.adapter_of(weights)
        plan = self._planned(weights)
        found = dict[str, torch.Tensor]()
        places = dict[tuple[object, ...], str]()
        for name, tensor in checkpoint_weights(weights, plan):
            if plan.joined(name):
                raise errors.CodecError(
                    f"{name} is only a part of a tensor of the checkpoint, and no view of it"
                )
            for target in plan.targets(name, tensor):
                if target.dtype != "BF16":
                    raise errors.CodecError(f"versions hold {target.name} in {target.dtype}, not in bf16")
                view = target.view.of(tensor.detach()) if target.view else tensor.detach()
                if (other := places.setdefault(_place(view), target.name)) != target.name:
                    raise errors.CodecError(
                        f"{target.name} is tied to {other}, and an undo would change it twice: untie it"
                    )
                found[target.name] = view
        return found

    def close(self) -> None:
        """Stop; syncs that were not flushed may be lost.

        Raises:
            TimeoutError: The upload of a state takes too long.
        """
        self._closed = True
        self._resources.close()
        self._saver.wait(_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush, if the block succeeded and called `publish`. Then close. Raises the first of all errors."""
        try:
            if kind is None and self._begun:
                self.flush()
        except BaseException as first:
            kind = type(first)
            raise
        finally:
            with contextlib.suppress(*(errors.DeltaWeightSyncError, TimeoutError) if kind else ()):
                self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ConfigError(
                "this Publisher is closed: publish inside of its `with` block, or open another Publisher"
            )

    def _refused(self, weights: Model) -> str:
        """The digest of untrained weights, with which a run that has trained ones may not go on. All ranks
        call this together."""
        if isinstance(weights, lora.Adapter):  # each start draws other ones
            untrained = all(self._peers.exchange(weights.is_untrained()))
            return self.digest(weights) if untrained else ""
        with self._peers.fail_together():
            known = (self.reader, self._start, self._outbox.specs)
            digest = restarts.untrained_digest(*known) if self._peers.main else ""
        refused: str = self._peers.exchange(digest)[0]
        return refused

    def _taken(self, weights: Model) -> Model:
        """What `publish` got, once it is checked: of a run that publishes an adapter, the adapter."""
        if not self._adapter:
            taken: Model = arguments.named(weights)
            return taken
        adapter = lora.adapter_of(weights)
        if self._config is not None:
            adapter.require_same_meaning(self._config)
        self._config = adapter.config
        return adapter

    def _trained(self, weights: Model) -> dict[str, torch.Tensor]:
        """The tensors that a state holds. Of a model that is published merged, a version has others."""
        if self._adapter:
            return dict(checkpoint_weights(lora.adapter_of(weights)))
        found = adapted(weights) if isinstance(weights, torch.nn.Module) else weights
        return dict(found.trained() if isinstance(found, Merged) else checkpoint_weights(found))

    def _require_version(self) -> None:
        if not self._has_version:
            raise errors.ConfigError("nothing was published yet: call `publish` first")

    def _planned(self, weights: Model) -> Plan:
        """Plan how the trainer's tensors become those of a version. All ranks call this together."""
        if self._plan is None:
            with self._peers.fail_together():
                plan = self._make_plan(weights) if self._peers.main else None
            self._plan = self._peers.exchange(plan)[0]
        assert self._plan is not None
        return self._plan

    def _make_plan(self, weights: Model) -> Plan:
        if self._adapter:
            return self._adapter_plan(lora.adapter_of(weights))
        found = adapted(weights) if isinstance(weights, torch.nn.Module) else None
        model = None if isinstance(found, Merged) else unwrapped(found)
        specs = self._outbox.specs
        if not specs:  # no version yet, or none that could be rebuilt
            if self._start is None:
                raise errors.ConfigError(
                    f"the newest version of run {self.reader.keys.run!r} cannot be rebuilt, so nothing tells"
                    " the tensors and dtypes of a version: give the base that the run began with"
                )
            return self._start.plan(model)
        shapes = {name: spec.shape for name, spec in specs.items()}
        if model is not None:
            names = find_names(model, shapes)
        elif self._start:
            names = find_names(self._start.folder, shapes)
        else:
            with Scratch() as folder:
                if self._writer and self._writer.newest:
                    self.reader.fetch_all(self._writer.newest.anchor.small, folder)
                names = find_names(folder, shapes)
        plan = Plan(f"run {self.reader.keys.run!r}", specs, names, fixed=True)
        if self._start and self._assets:
            self._start.write_files(self._assets, plan, specs)
        return plan

    def _adapter_plan(self, adapter: lora.Adapter) -> Plan:
        assert self._writer is not None
        assert self._assets is not None
        if self._continued:
            adapter.require_same_meaning(lora.config_of(self.reader, self._continued))
        adapter.write_config(self._assets)
        self._writer.model = adapter.base
        specs = self._outbox.specs
        return Plan(f"run {self.reader.keys.run!r}" if specs else "", specs, Names(), fixed=bool(specs))

    def _untrained(
        self, trained: Specs, own: Iterable[str], bits: Callable[[str], Bits]
    ) -> Iterator[tuple[str, str, Bits]]:
        """Yield the base's tensors that the trainer does not publish; then write the files that fit."""
        assert self._start is not None
        assert self._assets is not None
        assert self._plan is not None
        version = dict(trained)
        for name, dtype, words in self._start.untrained(self._plan, trained, own, bits):
            version[name] = Spec.of_words(dtype, words.shape)
            yield name, dtype, words
        self._start.write_files(self._assets, self._plan, version)

    def _named(self, weights: Model, plan: Plan) -> Weights:
        """Yield the trainer's tensors. The first time, log at the end which of them are rounded from float32,
        unless the trainer keeps all weights in float32, as masters."""
        names = set[str]()
        rounded = list[str]()
        some_are_half = False
        for name, tensor in checkpoint_weights(weights, plan):
            if name in names:
                raise errors.CodecError(f"parameter {name} comes twice: publish `model.named_parameters()`")
            if PEFT.search(name) and not self._adapter:
                raise errors.ConfigError(f"{name} is PEFT's name of a parameter: {MERGED}")
            names.add(name)
            targets = () if plan.joined(name) else plan.targets(name, tensor)
            if not self._rounding_known:
                some_are_half |= dtype_of(tensor) in HALF
                rounded += [t.name for t in targets if tensor.dtype == torch.float32 and t.dtype in HALF]
            yield name, tensor
        if rounded and some_are_half and not self._rounding_known:
            _log.warning(
                "%d float32 tensors of the trainer are rounded, such as %s, because %s has them in 16 bits",
                *(len(rounded), rounded[0], plan.source or "the run"),
            )
        self._rounding_known = True

    def _whole(self, weights: Model, plan: Plan) -> Iterator[Held]:
        for name, tensor in self._named(weights, plan):
            if isinstance(tensor, DTensor):
                raise errors.CodecError(f"{name} is sharded: call publish_base before you shard the model")
            yield from gathered([(name, tensor)], plan, lambda *_: True, first=True)

    def _published(self, weights: Model) -> Weights:
        """Yield those of the trainer's tensors that versions have."""
        plan = self._planned(weights)
        for name, tensor in checkpoint_weights(weights, plan):
            joined = plan.joined(name)
            made = joined.names if joined else [target.name for target in plan.targets(name, tensor)]
            if all(each in self._outbox.shapes for each in made):
                yield name, tensor

    def _open(
        self,
        url: str,
        base: str | Path | None,
        trust_remote_code: bool,
        signing_key: str | Path | None,
        on_version: Callable[[Manifest], object] | None,
    ) -> None:
        """Open the run for writing, on rank 0."""
        place, named = split_run(url)
        signing, trusted = writer_keys(signing_key)
        start = Base(base, trust_remote_code=trust_remote_code) if base is not None else None
        bucket = open_bucket(place, create=True)
        run = named or DEFAULT_RUN
        with contextlib.ExitStack() as stack:
            assets = stack.enter_context(Scratch())
            newest = RunReader(bucket, run, trusted).newest()
            if newest and newest.anchor.is_adapter != self._adapter:
                what = "whole weights" if self._adapter else "an adapter"
                raise errors.ConfigError(
                    f"the versions of run {run!r} hold {what}: choose another run name, or"
                    f" {'leave out' if self._adapter else 'set'} adapter=True"
                )
            if newest is None and not start and not self._adapter:
                raise errors.CheckpointError(
                    f"run {run!r} in {bucket.url} is new: name the checkpoint that the policy was loaded"
                    ' from, as in base="Qwen/Qwen3-0.6B"'
                )
            if newest and newest.signature and not signing:
                raise errors.ConfigError(
                    f"the versions of run {run!r} are signed, and replicas with a key would refuse yours: set"
                    f" {SIGNING_KEY}, or choose another run name"
                )
            if newest is None and start:
                _ = start.checkpoint  # raises if the weights cannot be read, before anything is written
            self._start = start
            self._assets = assets if start or self._adapter else None
            model = start.name if start else ""
            writer = RunWriter(bucket, run, model=model, assets=self._assets, signing_key=signing_key)
            log = stack.enter_context(contextlib.closing(RunLogWriter(bucket, run, writer.writer)))
            if writer.newest:
                log.complete(writer.newest)
            writer.log = log
            if on_version:  # closed before the log, to which the function may append
                listener = stack.enter_context(contextlib.closing(Listener(on_version)))
                writer.on_version = listener.tell
            self._writer = writer
            self.reader = writer.reader
            self.log = log
            self._resources = stack.pop_all()


def checkpoint_weights(weights: Model, plan: Plan | None = None) -> Weights:
    """Yield each weight once, without the prefixes that torch.compile, DDP, FSDP and others add to its name.

    A model gives its parameters, and those of its persistent buffers that the checkpoint of `plan` has. In a
    model or a mapping such as `model.state_dict()`, tied weights are one tensor of two names; the first is
    used, and with a `plan` also the others that its versions have.

    Raises:
        CodecError: A tensor has no memory that can be read.
        ConfigError: A name begins with PEFT's `base_model.model`, and `weights` is no adapter.
    """
    if isinstance(weights, torch.nn.Module):
        weights = adapted(weights)
    kept = isinstance(weights, torch.nn.Module | Mapping | ItemsView)
    seen = set[tuple[object, ...]]()
    for name, tensor in _items(weights, plan):
        plain = plain_name(name)
        if plain.startswith("base_model.model.") and not isinstance(weights, lora.Adapter):
            raise errors.ConfigError(
                f"{plain} is PEFT's name of a parameter, which no server knows: {MERGED}"
            )
        require_readable(plain, tensor)
        if kept:  # all tensors stay alive, so two share memory only if they are tied
            place = _place(tensor)
            if place in seen and (plan is None or plan.lacks_tied(plain)):
                continue
            seen.add(place)
        yield plain, tensor


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the elements are that this rank holds; equal for tied tensors."""
    held = local(tensor)
    return held.untyped_storage()._cdata, held.storage_offset(), held.shape, held.stride()


def _items(weights: Model, plan: Plan | None) -> Weights:
    if isinstance(weights, Mapping):
        yield from arguments.pairs(weights.items())
    elif isinstance(weights, Merged):
        yield from weights.tensors(plan)
    elif isinstance(weights, lora.Adapter):
        yield from weights
    elif isinstance(weights, torch.nn.Module):
        yield from weights.named_parameters(remove_duplicate=False)
        for path, module in weights.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{path}.{key}".lstrip(".")
                lacking = plan is not None and not plan.has(plain_name(name))
                if buffer is not None and key not in module._non_persistent_buffers_set and not lacking:
                    yield name, buffer
    else:
        yield from arguments.pairs(weights)
