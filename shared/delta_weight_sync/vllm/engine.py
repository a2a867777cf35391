"""A running vLLM as its follower sees it: calls to all workers of all its engines.

A data-parallel vLLM has several engines. Each engine stages a version (prepares the changes) and commits it
(writes the changes) on its own, but the follower treats all engines as one: a version is served when all have
it. If staging or a commit fails on one engine, the follower makes all engines join from a checkpoint.
"""

import asyncio
import concurrent.futures
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_weight_sync import compat, engine
from delta_weight_sync.engine import Dtypes, Shapes, Times
from delta_weight_sync.errors import CommitError, EngineError, WorkerError
from delta_weight_sync.model_config import require_same
from delta_weight_sync.runlog import Drafts, Quantization
from delta_weight_sync.util import Guard
from delta_weight_sync.vllm import METHOD, commits_between_steps, hooks, takes_images

_POLL_S = 0.02, 0.2  # first and longest pause between polls of a stage; each poll waits for vLLM's step
_TIMEOUT_S = 600.0  # for one answer; staging has no limit; `learn`, the slowest other call, takes seconds
_CHECK_S = 1.0  # how often a call checks that vLLM still lives
_reporting = Guard("the report on quantized weights")


class Engine(engine.Engine):
    """A running vLLM. This class cannot start one; a Space's engine overrides `alive`, `serves`, `start` and
    `stop`.
    """

    _drafts: dict[str, str] | None = None  # the workers' answer about their draft
    what = "vLLM"  # the engine's name in messages
    _asked_for_sampling: Any = None
    _sampling: tuple[str, dict[str, float]]

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        """`client`: vLLM's `EngineClient`, which lives in `loop`."""
        self._client = client
        self._loop = loop

    def sampling(self) -> tuple[str, dict[str, float]]:
        """vLLM's `logprobs_mode`, and its values for sampling parameters that a request leaves out, which may
        come from the model's `generation_config.json`. "" and {} while vLLM is not running."""
        client = self._client
        if client is None:
            return "", {}
        if self._asked_for_sampling is not client:  # ask once, because vLLM reads a file for each answer
            config = client.vllm_config.model_config
            known = config.get_diff_sampling_param().items()
            defaults = {name: float(value) for name, value in known if isinstance(value, int | float)}
            self._sampling = str(config.logprobs_mode), defaults
            self._asked_for_sampling = client
        return self._sampling

    def describe(self) -> str:
        """The release of vLLM, how it takes commits, and the features that it lacks."""
        name, version = compat.installed(hooks.VLLM)
        how = "between two steps" if commits_between_steps() else "while it is paused"
        lacking = [f"no {each.what}" for each in hooks.FEATURES if each.applies() and each.missing()]
        return "; ".join((f"{name} {version}, commits {how}", *lacking))

    def drafts(self) -> Drafts | None:
        """What vLLM drafts with, and its counts of draft tokens; None if it does not decode speculatively."""
        if self._drafts is None:
            return None
        from delta_weight_sync.vllm.drafts import read_counts  # imports torch

        return read_counts(self._drafts)

    def alive(self) -> bool:
        """Whether vLLM still answers."""
        return not self._client.errored

    def serves(self, checkpoint: Path) -> bool:
        """True: this vLLM runs, and nothing here can restart it. Raises `EngineError` if it was started with
        a config that computes otherwise than the checkpoint's."""
        config = self._client.vllm_config.model_config
        require_same(config.hf_config_path or config.model, config.revision, checkpoint, self.what)
        return True

    def learn(self, shapes: Shapes, dtypes: Dtypes) -> str:
        """Find a run's tensors in vLLM's parameters; returns the digest of the live weights."""
        config = self._client.vllm_config
        keeps = config.kv_transfer_config or config.ec_transfer_config
        images = takes_images(config.model_config) and not hooks.MEDIA.works()
        if not commits_between_steps() and (keeps or images):
            raise EngineError(
                "this vLLM would reuse results of old weights; drop --kv-transfer-config and "
                "--ec-transfer-config, and add --language-model-only",
                CommitError.kind,
            )
        self._until_done(self._ask("warm"))  # compiles kernels while vLLM generates; `learn` makes vLLM wait
        answers = self._ask("learn", shapes=shapes, dtypes=dtypes)
        self._note(answers[0])
        # With pipeline parallelism, only the last worker has a draft.
        told = [answer["drafts"] for answer in answers if "drafts" in answer]
        self._drafts = max(told, key=lambda draft: bool(draft["kept"]), default=None)
        return str(answers[0]["digest"])

    def take(self, deltas: Sequence[Path], digest: str, label: str) -> Times:
        """Stage delta files, in this order, while vLLM generates; then commit them between two steps.

        If one of several engines fails, it keeps its old weights, and others may have committed. A vLLM that
        pauses computes the keys and values of running requests again.
        """
        return self._take(digest, label, deltas=[str(path.absolute()) for path in deltas])

    def take_checkpoint(self, folder: Path, digest: str, label: str) -> Times:
        """Like `take`, for all live weights that differ from a checkpoint."""
        return self._take(digest, label, checkpoint=str(folder.absolute()))

    async def _commit_while_paused(self, digest: str, label: str) -> tuple[float, float, float]:
        """Commit by vLLM's own calls, which drop all keys and values before anything is written."""
        started = time.perf_counter()
        held = await self._client.is_paused()  # by somebody else, who will also resume it
        await self._client.pause_generation(mode="keep", clear_cache=False)
        try:
            if not await self._client.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM kept prefixes of old weights, so nothing was written")
            answers = await self._call("commit", digest=digest, label=label)
            self._note(answers[0])
            if takes_images(self._client.vllm_config.model_config):
                await self._client.reset_encoder_cache()
            await self._client.update_weight_version(label)
        finally:
            if not held:
                await self._client.resume_generation()
        return time.perf_counter() - started, _largest("commit_s", answers), _largest("live_at", answers)

    def relabel(self, label: str) -> None:
        """Put `label` on later tokens, for a version that changes no weights."""
        self._wait(self._client.update_weight_version(label))

    def _take(self, digest: str, label: str, **what: Any) -> Times:
        """Stage and commit.

        If a worker is in the engine's process and vLLM need not be paused, the call "stage" also commits.
        Other workers are separate processes, which handle one call at a time. A call that waited for the end
        of staging would hold up vLLM's steps, so this method polls such workers instead.
        """
        between = commits_between_steps()
        then: dict[str, Any] = {"op": "commit", "digest": digest, "label": label}
        answers = self._ask("stage", timeout_s=math.inf, **what, **({"then": then} if between else {}))
        answers = self._until_done(answers)
        stage_s = _largest("stage_s", answers)
        if not between:
            return stage_s, *self._wait(self._commit_while_paused(digest, label))
        if not all("pause_s" in answer for answer in answers):
            answers = self._ask(**then)
        self._note(answers[0])
        pause_s = _largest("pause_s", answers)
        commit_s = _largest("commit_s", answers)
        return stage_s, pause_s, commit_s, _largest("live_at", answers)

    def _note(self, answer: dict[str, Any]) -> None:
        found = answer.get("quantized")
        self.quantized = None
        with _reporting:  # the weights are live, whatever a report says of them
            self.quantized = Quantization.model_validate(found) if found else None

    def _until_done(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        pause, longest = _POLL_S
        while not all(answer["done"] for answer in answers):
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            answers = self._ask("staged", timeout_s=math.inf)
        return answers

    def _ask(self, op: str, *, timeout_s: float = _TIMEOUT_S, **arguments: Any) -> list[dict[str, Any]]:
        return list(self._wait(self._call(op, **arguments), timeout_s))

    async def _call(self, op: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all workers of all engines; `EngineClient.collective_rpc` asks one engine only."""
        kwargs = {"op": op, **arguments}
        if hooks.ENGINES.works():
            core = self._client.engine_core
            engines = await core.call_utility_all_async("collective_rpc", METHOD, None, (), kwargs)
        elif self._client.vllm_config.parallel_config.data_parallel_size == 1:
            engines = [await self._client.collective_rpc(METHOD, kwargs=kwargs)]
        else:
            raise EngineError("this vLLM answers for one engine only; drop --data-parallel-size")
        answers = [answer for workers in engines for answer in workers]
        # Raise the cause: a `WorkerError` only repeats another worker's error.
        for answer in sorted(answers, key=lambda each: each.get("kind") == WorkerError.kind):
            if "error" in answer:
                raise EngineError(answer["error"], answer["kind"])
        return answers

    def _wait(self, call: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        deadline = time.monotonic() + timeout_s
        while not concurrent.futures.wait([future], _CHECK_S).done:
            if not (alive := self.alive()) or time.monotonic() > deadline:
                future.cancel()
                problem = f"did not answer within {timeout_s:.0f} s" if alive else "died"
                raise EngineError(f"vLLM {problem}; see its log")
        try:
            return future.result()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM does not answer: {type(error).__name__}: {error}") from error


def _largest(name: str, answers: list[dict[str, Any]]) -> float:
    return max(float(answer.get(name, 0.0)) for answer in answers)
