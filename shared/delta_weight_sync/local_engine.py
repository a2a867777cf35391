"""The engine of a follower that runs in the process of the weights: it stages, commits, undoes and labels.

A subclass adds what differs between such engines: where the tensors are, how to run something between two
steps, and how tokens are labelled and prefixes forgotten.
"""

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch

from delta_weight_sync.digest import to_hex
from delta_weight_sync.engine import Dtypes, Engine, Shapes, Times
from delta_weight_sync.errors import CodecError, DeltaWeightSyncError, EngineError
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.memory import Step
from delta_weight_sync.vllm.routes import Route

Result = TypeVar("Result")
Owned = dict[str, tuple[int, ...]]
"""Checkpoint name -> the indices of the route's pieces that count in the digest."""


class LocalEngine(Engine):
    """An engine whose weights are in this process, all of them, on one device.

    Attributes:
        label: What later tokens are labelled with.
        weights: The live weights, from the first `learn` on.
    """

    weights: worker.LiveWeights

    def __init__(self, label: str) -> None:
        """`label`: that of tokens made before the first version."""
        self.label = label
        self._digest = 0
        self._rechecks: Thread | None = None

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """The live model."""

    @abstractmethod
    def find(self, shapes: Shapes, dtypes: Dtypes) -> tuple[dict[str, Route], Owned]:
        """Find all tensors of a run in the live model, between two steps. Nothing is written.

        Raises:
            RouteError: A tensor is not there bit for bit, or the model holds something computed from it.
        """

    @abstractmethod
    def between_steps(self, call: Callable[[], Result]) -> Result:
        """Run `call` while no step reads the weights, and wait for it. Raises what it raises."""

    def set_label(self, label: str) -> None:
        """Put `label` on tokens made from now on. Called between two steps."""
        self.label = label

    def forget_prefixes(self) -> None:
        """Let later requests reuse nothing that was computed until now. Called between two steps. An engine
        that keeps nothing from one request to the next has nothing to forget."""

    def learn(self, shapes: Shapes, dtypes: Dtypes) -> str:
        """Find a run's tensors in the model; returns the digest of the live weights."""
        worker.warm_up(next(self.model().parameters()).device)  # compiles, while the engine generates
        return _checked(lambda: self.between_steps(partial(self._learn, shapes, dtypes)))

    def _learn(self, shapes: Shapes, dtypes: Dtypes) -> str:
        routes, owned = self.find(shapes, dtypes)
        self.weights = worker.LiveWeights(routes, owned, worker.Fallback(self.model(), {}), worker.Ranks(1))
        self._digest = self.weights.digest()
        if self._rechecks is None:
            self._rechecks = worker.rechecks(weakref.ref(self))
        return to_hex(self._digest)

    def take(self, deltas: Sequence[Path], digest: str, label: str) -> Times:
        """Stage delta files while the engine generates, then commit between two steps."""
        return _checked(lambda: self._take(lambda: self.weights.stage(deltas, self._digest), digest, label))

    def take_checkpoint(self, folder: Path, digest: str, label: str) -> Times:
        """Like `take`, for all live weights that differ from a checkpoint."""
        return _checked(lambda: self._take(lambda: self.weights.stage_checkpoint(folder), digest, label))

    def relabel(self, label: str) -> None:
        """Put `label` on later tokens, for a version that changes no weights."""
        _checked(lambda: self.between_steps(lambda: self.set_label(label)))

    def _take(self, stage: Callable[[], worker.Staged], digest: str, label: str) -> Times:
        started = time.perf_counter()
        staged = stage()
        if (found := to_hex(staged.digest)) != digest:
            raise CodecError(f"the staged changes give digest {found}, but the published one is {digest}")
        stage_s = time.perf_counter() - started
        return stage_s, *self.between_steps(partial(self._commit, staged, label))

    def _commit(self, staged: worker.Staged, label: str) -> tuple[float, float, float]:
        """Write and label, or undo both. Returns the seconds of the pause and of writing, and the time."""
        began = time.perf_counter()
        before = self.label

        def mark() -> tuple[int, float]:
            self.forget_prefixes()
            self.set_label(label)
            return 0, 0.0

        with torch.no_grad():
            waited_s = worker.commit(
                [*staged.steps, Step(mark, lambda: self.set_label(before))], worker.Ranks(1)
            )
        self._digest = staged.digest
        took_s = time.perf_counter() - began
        return took_s - waited_s, took_s - waited_s, time.time()


def _checked(call: Callable[[], Result]) -> Result:
    """Raise each error as the follower expects it of an engine."""
    try:
        return call()
    except EngineError:
        raise
    except DeltaWeightSyncError as error:
        raise EngineError(str(error), error.kind) from error
