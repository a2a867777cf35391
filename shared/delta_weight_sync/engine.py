"""What a follower needs of an engine: to learn a run's tensors, to stage, commit and label a version.

`vllm.engine.Engine` calls the workers of a vLLM. If the weights are in the follower's own process, derive an
engine from `local_engine.LocalEngine`, which stages, commits and undoes; `sglang.engine` is an example.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from delta_weight_sync.errors import EngineError
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import Drafts, Quantization

Shapes = dict[str, list[int]]  # checkpoint name -> shape of the tensor's words
Dtypes = dict[str, str]  # checkpoint name -> dtype, of tensors that are not BF16
Times = tuple[float, float, float, float]
"""Seconds of staging, of the pause, and of writing within the pause; the moment when the version became live.

This moment is when the last worker was done, in unix seconds by the clock of this worker's host. (An engine
may have several hosts.)
"""


def label_of(manifest: Manifest) -> str:
    """The engine's label for the tokens of a version, as JSON. It goes into answers unread."""
    weights = {"version": manifest.version, "term": manifest.writer_term, "sync": manifest.sync}
    return json.dumps(weights, separators=(",", ":"))


class Engine(ABC):
    """A running engine that takes commits. Each call blocks, and raises `EngineError` if it fails.

    The follower calls from one thread: `learn` once for each set of tensors, then `take` for each version.
    `describe`, `sampling` and `drafts` are for the status, which other threads ask for at any time. An engine
    that the follower starts overrides `serves`, `start` and `stop`.
    """

    adapters = False  # whether this engine takes runs that publish an adapter, and no others
    quantized: Quantization | None = None  # of the weights that are live
    what = ""  # the engine's name in messages

    @abstractmethod
    def learn(self, shapes: Shapes, dtypes: Dtypes) -> str:
        """Find a run's tensors in the engine's parameters, all of them; returns the digest of the live
        weights. The error's `kind` is `RouteError.kind` if deltas cannot update this model."""

    @abstractmethod
    def take(self, deltas: Sequence[Path], digest: str, label: str) -> Times:
        """Stage delta files, in this order, while the engine generates; then commit them between two steps.

        On success, the live weights have `digest`, later tokens have `label`, new requests reuse no older
        prefix, and running requests continue with the new weights. On an error, the weights and the label are
        as they were; prefixes may be forgotten.
        """

    @abstractmethod
    def take_checkpoint(self, folder: Path, digest: str, label: str) -> Times:
        """Like `take`, for all live weights that differ from a checkpoint, whatever the live weights are."""

    @abstractmethod
    def relabel(self, label: str) -> None:
        """Put `label` on later tokens, for a version that changes no weights."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the engine still answers."""

    @abstractmethod
    def describe(self) -> str:
        """The release of the engine, how it takes commits, and what it lacks."""

    def sampling(self) -> tuple[str, dict[str, float]]:
        """vLLM's `logprobs_mode`, and the engine's values for sampling parameters that a request leaves out.
        "" and {} if they are not known."""
        return "", {}

    def drafts(self) -> Drafts | None:
        """What the engine drafts with, and its counts of tokens; None if it decodes token by token."""
        return None

    def serves(self, checkpoint: Path) -> bool:
        """Whether the engine can take this checkpoint without a restart; `learn` checks that its tensors
        fit."""
        return True

    def start(self, checkpoint: Path) -> None:
        """Start or restart the engine with this checkpoint."""
        raise EngineError(
            f"this {self.what} cannot be started from here; start it again as you did the first time"
        )

    def stop(self) -> None:  # noqa: B027 - most engines are started by somebody else
        """Stop the engine that `start` started, even if it is still starting."""
