"""The engine of a running vLLM as its follower sees it: calls to all its workers, by `collective_rpc`.

A data-parallel vLLM has several engines. Each stages and commits by itself, and they follow as one: a version
is served when all have it, and where one failed, all join it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm import METHOD
from delta_weight_sync.vllm.layout import Shapes

_POLL_S = 0.002, 0.05  # at first, at most
_PATIENCE_S = 600.0  # for one answer; a large model is hashed in seconds


class EngineError(DeltaWeightSyncError, RuntimeError):
    """vLLM refused or lost a call; `kind` is the class of the error in its worker."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Engine:
    """A running vLLM that takes commits. Each call blocks, and raises `EngineError`.

    Whoever started it starts it again; a Space's own overrides `alive`, `serves`, `start` and `stop`.
    """

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        """`client`: vLLM's `EngineClient`, which lives in `loop`."""
        self._client, self._loop = client, loop

    def alive(self) -> bool:
        """Whether it still answers."""
        return not self._client.errored

    def serves(self, checkpoint: Path) -> bool:
        """Whether it can hold this checkpoint as it runs; `learn` refuses tensors that do not fit."""
        return True

    def start(self, checkpoint: Path) -> None:
        """Start it, or start it anew, with this checkpoint."""
        raise EngineError("this vLLM cannot be started from here; start it again as you did the first time")

    def stop(self) -> None:
        """End what `start` started, also while it does."""

    def learn(self, shapes: Shapes) -> str:
        """Let it find the tensors of a run (checkpoint name -> shape) in its parameters.

        Returns the digest of what is there.
        """
        return str(self._ask("learn", shapes=shapes)[0]["digest"])

    def stage(self, deltas: Sequence[Path]) -> float:
        """Prepare what delta files do, in order, while it generates; returns the seconds it took."""
        return self._stage(deltas=[str(path.absolute()) for path in deltas])

    def stage_checkpoint(self, folder: Path) -> float:
        """Prepare to write what differs from a checkpoint, whatever is live; returns the seconds it took."""
        return self._stage(checkpoint=str(folder.absolute()))

    def commit(self, digest: str, label: str) -> tuple[float, float]:
        """Write what is staged between two steps; returns seconds: of the pause, and of the writing in it.

        Requests in flight go on with the new weights, no new one is given a prefix of older weights, and
        `label` is on each token from the next on. If it fails, none of this has happened.
        """
        answers = self._ask("commit", digest=digest, label=label)
        return max(float(answer.get("pause_s", 0.0)) for answer in answers), _longest("commit_s", answers)

    def relabel(self, label: str) -> None:
        """Put `label` on the tokens of weights that did not have to change."""
        self._wait(self._client.update_weight_version(label))

    def _stage(self, **what: Any) -> float:
        self._ask("stage", **what)
        pause, longest = _POLL_S
        answers = self._ask("staged")
        while not all(answer["done"] for answer in answers):
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            answers = self._ask("staged")
        return _longest("stage_s", answers)

    def _ask(self, op: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all workers of all engines; raises `EngineError` with the first refusal of any.

        `EngineClient.collective_rpc` would do, if it gave the answers of all engines and not of the first.
        """
        core, kwargs = self._client.engine_core, {"op": op, **arguments}
        engines = self._wait(core.call_utility_all_async("collective_rpc", METHOD, None, (), kwargs))
        answers = [answer for workers in engines for answer in workers]
        for answer in answers:
            if "error" in answer:
                raise EngineError(answer["error"], answer["kind"])
        return answers

    def _wait(self, call: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(_PATIENCE_S)
        except EngineError:
            raise
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise EngineError(f"vLLM did not answer within {_PATIENCE_S:.0f} s") from None
        except Exception as error:
            raise EngineError(f"vLLM does not answer: {type(error).__name__}: {error}") from error


def _longest(name: str, answers: list[dict[str, Any]]) -> float:
    return max(float(answer[name]) for answer in answers)
