"""How TRL's rollout worker reaches the replicas: several, cold ones, and which version made a sample."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
from datasets import Dataset
from multidict import CIMultiDict, CIMultiDictProxy
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)

from delta_weight_sync.publish.trl_trainer import Progress
from trainer import space_access
from trainer.cold_spaces import PATIENCE_S, SpacesUnavailableError
from trainer.token_syncs import Conversation, TokenSyncs, traced

MODEL_NAME = "policy"  # what every replica calls the model it serves
NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())
_NOT_NOW = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)
# The one that is being generated.
_conversation: contextvars.ContextVar[Conversation] = contextvars.ContextVar("conversation")


class RequestRefusedError(RuntimeError):
    """A replica will never answer such a request, for example a prompt longer than its context."""


class ReplicaRolloutLoop(_AsyncRolloutLoop):
    """TRL's loop in its child process, with requests spread over replicas and samples tagged truthfully.

    A sample's `model_version` becomes the trainer's sync count of the oldest weights that produced a token of
    its conversation, as the replicas report it; TRL alone would stamp what was last sent as its group began.
    Beside it each token has its own.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[str],
        writer_term: int,
        prompts: int,
        later: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """`prompts`, `later`: which were trained on, see `Progress`; they are not played again."""
        super().__init__(**kwargs)
        self._prepare_turns()
        self._replicas, self._writer_term = list(replicas), writer_term
        self._prompts, self._later = prompts, set(later)
        self._rows: dict[str, list[tuple[int, TokenSyncs]]] = {}  # by rollout id, until they are scored

    def _prepare_turns(self) -> None:
        """Do once what would be done again at each turn of each conversation, and cost more than the request:
        derive the tools' schemas from their docstrings, and compile the way in which a response is read.
        """
        if self.environment_factories is not None:
            schemas = {name: [*map(get_json_schema, tools)] for name, tools in self._env_tools.items()}
            self._env_tools = schemas
        if template := getattr(self.tokenizer, "response_template", None):
            self.tokenizer.response_template = load_response_template(template)

    @property
    def _request_model(self) -> str:
        return MODEL_NAME

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """As TRL's, without the prompts that an earlier trainer of the run has trained on."""
        for group_id in itertools.count(self._prompts):
            if group_id not in self._later:
                row = self.dataset[group_id % len(self.dataset)]
                yield from itertools.repeat((group_id, row), self.num_generations)

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        conversation = Conversation()
        _conversation.set(conversation)  # TRL gives each one a task, and so a context, of its own
        space_access.share(self.session)
        rollout = await super()._generate_one(prompt, tool_dict, tools, group_id)
        if sequences := rollout[2]:
            self._rows[sequences[0].rollout_id] = conversation.rows(self._fork_threshold_tokens)
        return rollout

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        output_ids, log_probs = await super()._generate_one_turn(prompt_ids)
        _conversation.get().add_turn(prompt_ids, output_ids)
        return output_ids, log_probs

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        ids = [sequences[0].rollout_id for sequences in group.completions_sequences if sequences]
        rows = [row for rollout_id in ids for row in self._rows.pop(rollout_id)]
        return [traced(sample, *row) for sample, row in zip(samples, rows, strict=True)]

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        deadline = time.monotonic() + PATIENCE_S
        first = random.randrange(len(self._replicas))
        for attempt in range(1 << 30):
            url = self._replicas[(first + attempt) % len(self._replicas)]
            try:
                return await self._ask(f"{url}{path}", payload, timeout)
            except _NOT_NOW as error:
                if _is_final(error):
                    raise RequestRefusedError(f"{url} refused a rollout's request: {error}") from error
                if time.monotonic() > deadline:
                    raise SpacesUnavailableError(f"{url} does not answer: {error}") from error
                self._counters["rollout/vllm_retry_total"] += 1
                await asyncio.sleep(1.0)
        raise AssertionError("unreachable")

    async def _ask(self, url: str, payload: dict, timeout: float) -> dict:
        limit = aiohttp.ClientTimeout(total=timeout)
        # A redirect would carry the key to wherever it leads.
        options = {"headers": space_access.headers(url), "allow_redirects": False, "timeout": limit}
        async with self.session.post(url, json=payload, **options) as response:
            if response.status >= 300:
                reason = f"{response.reason}: {(await response.text())[:300]}"
                asked = response.request_info._replace(headers=NO_HEADERS)  # an error must not tell the key
                raise aiohttp.ClientResponseError(asked, (), status=response.status, message=reason)
            inherited = self._model_version_value.inherited
            _conversation.get().hear(response.headers, self._writer_term, inherited)
            return await response.json()


def _is_final(error: BaseException) -> bool:
    """A 4xx will not get better; everything else may be a replica that wakes, restarts or commits."""
    return (
        isinstance(error, aiohttp.ClientResponseError) and 400 <= error.status < 500 and error.status != 429
    )


class Syncs(ctypes.Structure):
    """The trainer's sync count, and up to which of them the run's last trainer did the same."""

    _fields_ = (("value", ctypes.c_int), ("inherited", ctypes.c_int))


class ReplicaRolloutWorker(AsyncRolloutWorker):
    """TRL's worker, running `ReplicaRolloutLoop`."""

    _loop_cls = ReplicaRolloutLoop

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._model_version_value = self._mp_ctx.Value(Syncs)

    def inherit(self, sync: int) -> None:
        """Versions of the run's last trainer up to this sync are this trainer's as well."""
        self._model_version_value.inherited = sync

    def stop(self) -> None:
        """As in TRL, but without its stalls.

        A child that is blocked on a full queue does not exit, so the queues are drained; one that waits for
        an answer has nothing that would be missed. What may never return is left to threads: setting an
        event on which a dead child waited, and reading what a child was killed in the middle of writing.
        """
        process, self._process = self._process, None
        if process is None or not process.is_alive():
            return
        ended = threading.Event()
        for work in (self._stop_event_mp.set, lambda: self._drain(ended)):
            threading.Thread(target=work, daemon=True).start()
        process.join(1.0)
        process.kill()
        process.join()
        ended.set()

    def _drain(self, ended: threading.Event) -> None:
        while not ended.wait(0.05):
            for pending in (self.rollout_buffer, self.metrics_queue):
                with contextlib.suppress(queue.Empty, OSError, EOFError):
                    while True:
                        pending.get_nowait()


def _inflight(args: AsyncGRPOConfig) -> int:
    """TRL's own rule for an unset `max_inflight_tasks`: no more than can be trained before it is stale."""
    if args.max_inflight_tasks >= 0:
        return args.max_inflight_tasks
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return max(args.max_staleness, 1) * batch


def make_worker(
    args: AsyncGRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    replicas: Sequence[str],
    writer_term: int,
    *,
    begun: Progress | None,
    reward_funcs: list[Callable[..., list[float]]],
    environment_factory: Callable[[], object] | None,
) -> ReplicaRolloutWorker:
    """The worker that TRL would build from `args`, pointed at the replicas and going on from `begun`."""
    return ReplicaRolloutWorker(
        replicas=replicas,
        writer_term=writer_term,
        prompts=begun.prompts if begun else 0,
        later=begun.later if begun else (),
        model_name=MODEL_NAME,
        dataset=dataset,
        reward_funcs=reward_funcs,
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        environment_factory=environment_factory,
        num_generations=args.num_generations,
        max_inflight_tasks=_inflight(args),
        queue_maxsize=args.queue_maxsize,
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        request_timeout=args.request_timeout,
        chat_template_kwargs=args.chat_template_kwargs,
        max_tool_calling_iterations=args.max_tool_calling_iterations,
        log_completions=args.log_completions,
        num_completions_to_print=args.num_completions_to_print,
        fork_threshold_tokens=args.fork_threshold_tokens,
    )
