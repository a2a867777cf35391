"""Rollouts from several replicas, and the weights that generated each of their tokens.

This adapts TRL's rollout worker: requests are spread over the replicas, which may be asleep, and each sample
is labelled with the versions that the replicas report.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import itertools
import queue
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
import numpy as np
from multidict import CIMultiDict, CIMultiDictProxy
from numpy.typing import NDArray
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, TurnRecord

from delta_weight_sync.trl.trainer import Progress
from trainer import spaces
from trainer.settings import Settings
from trainer.spaces import SpacesUnavailableError
from trainer.tasks import Task

MODEL_NAME = "policy"  # the name under which every replica serves its model
UNKNOWN = -1  # sync of a token that the policy did not generate, or whose weights no replica reported
TokenSyncs = NDArray[np.int64]
_SPAN = re.compile(r"(\d+):(\d+)-(\d+)", re.ASCII)
_RETRIED = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class RequestRefusedError(RuntimeError):
    """A replica will never answer this request, for example because the prompt exceeds its context."""


@dataclass(slots=True, kw_only=True)
class TracedSample(RolloutSample):
    """TRL's sample, and for each of its tokens the sync whose weights generated it: int64 [tokens]."""

    token_syncs: TokenSyncs


class Conversation:
    """The weights that generated the answers of one conversation, as the replicas report them."""

    def __init__(self) -> None:
        self._oldest: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        self._turns: list[TurnRecord] = []  # with syncs in place of log-probabilities

    def add_headers(self, headers: Mapping[str, str], writer_term: int, inherited: int) -> None:
        """Record the headers of an answer; `add_turn` follows with its tokens.

        Weights of another trainer than `writer_term` count if this trainer inherited them, that is up to sync
        `inherited`. It never had any later ones.
        """
        oldest = int(headers.get("x-policy-sync", 0))
        first_choice = headers.get("x-policy-syncs", "").split(";")[0]  # the trainer asks for one
        spans = [(int(sync), int(start), int(end)) for sync, start, end in _SPAN.findall(first_choice)]
        if int(headers.get("x-policy-term", -1)) != writer_term:
            oldest = min(oldest, inherited)
            spans = [span for span in spans if span[0] <= inherited]
        self._oldest.append(oldest)
        self._spans = spans

    def add_turn(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        syncs = np.full(len(output_ids), UNKNOWN)
        for sync, start, end in self._spans:
            syncs[start:end] = sync
        self._turns.append(TurnRecord(prompt_ids, output_ids, syncs.tolist()))

    def rows(self, fork_threshold: int) -> list[tuple[int, TokenSyncs]]:
        """For each sample that TRL makes of this conversation: its oldest sync, and the sync of each token of
        the sample."""
        sequences, _ = trl_worker._chain_to_sequences(self._turns, "", fork_threshold)
        found = [(np.array(s.completion_mask) == 1, np.array(s.old_log_probs)) for s in sequences]
        return [(min(self._oldest), np.where(own, syncs, UNKNOWN).astype(np.int64)) for own, syncs in found]


_conversation: contextvars.ContextVar[Conversation] = contextvars.ContextVar("conversation")


class ReplicaRolloutLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop in its child process, with requests spread over replicas and samples labelled exactly.

    A sample's `model_version` is the sync of the oldest weights that generated a token of its conversation.
    TRL by itself would use the trainer's sync at the start of the sample's group.
    """

    _env_tools: dict[str, Any]

    def __init__(
        self, *, replicas: Sequence[str], writer_term: int, prompts: int, later: Sequence[int], **kwargs: Any
    ) -> None:
        """`prompts` and `later` are those of `Progress`: prompts that were trained on are skipped."""
        super().__init__(**kwargs)
        self._replicas, self._writer_term = list(replicas), writer_term
        self._prompts, self._later = prompts, set(later)
        self._rows: dict[str, list[tuple[int, TokenSyncs]]] = {}  # by rollout id, until they are scored
        # TRL would derive schemas and compile the template in each turn, which costs more than a request.
        if self.environment_factories is not None:
            self._env_tools = {name: [*map(get_json_schema, t)] for name, t in self._env_tools.items()}
        if template := getattr(self.tokenizer, "response_template", None):
            self.tokenizer.response_template = load_response_template(template)

    @property
    def _request_model(self) -> str:
        return MODEL_NAME

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for group_id in itertools.count(self._prompts):
            if group_id not in self._later:
                row = self.dataset[group_id % len(self.dataset)]
                yield from itertools.repeat((group_id, row), self.num_generations)

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        conversation = Conversation()
        _conversation.set(conversation)  # TRL gives each conversation a task, and so a context, of its own
        spaces.share(self.session)
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
        traced = []
        for sample, (oldest, syncs) in zip(samples, rows, strict=True):
            known = {field.name: getattr(sample, field.name) for field in fields(RolloutSample)}
            traced.append(TracedSample(**known | {"model_version": oldest}, token_syncs=syncs))
        return traced

    async def _post(
        self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3
    ) -> dict[str, Any]:
        deadline = time.monotonic() + spaces.WAIT_LIMIT_S
        for attempt in itertools.count(random.randrange(len(self._replicas))):
            url = self._replicas[attempt % len(self._replicas)]
            try:
                return await self._request(f"{url}{path}", payload, timeout)
            except _RETRIED as error:
                status = getattr(error, "status", 0)
                # A replica that is waking up may give any other status: try again.
                if 400 <= status < 500 and status != 429:
                    raise RequestRefusedError(f"{url} refused a rollout's request: {error}") from error
                if time.monotonic() > deadline:
                    raise SpacesUnavailableError(f"{url} does not answer: {error}") from error
                self._counters["rollout/vllm_retry_total"] += 1
                await asyncio.sleep(1.0)
        raise AssertionError("unreachable")

    async def _request(self, url: str, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        # A redirect would carry the key to another host.
        options = {"headers": spaces.headers(url), "allow_redirects": False}
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self.session.post(url, json=payload, timeout=limit, **options) as response:
            if response.status >= 300:
                reason = f"{response.reason}: {(await response.text())[:300]}"
                no_key = CIMultiDictProxy(CIMultiDict[str]())  # the error must not contain it
                request = response.request_info._replace(headers=no_key)
                raise aiohttp.ClientResponseError(request, (), status=response.status, message=reason)
            inherited = self._model_version_value.inherited
            _conversation.get().add_headers(response.headers, self._writer_term, inherited)
            answer: dict[str, Any] = await response.json()
            return answer


class Syncs(ctypes.Structure):
    """Shared with the child process: the trainer's sync count, and the last sync that it inherited."""

    _fields_ = (("value", ctypes.c_int), ("inherited", ctypes.c_int))


class ReplicaRolloutWorker(trl_worker.AsyncRolloutWorker):
    _loop_cls = ReplicaRolloutLoop
    _process: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._model_version_value = self._mp_ctx.Value(Syncs)

    def inherit(self, sync: int) -> None:
        """Accept versions of the run's earlier trainer up to this sync: this trainer published the same."""
        self._model_version_value.inherited = sync

    def stop(self) -> None:
        """End the child process, without TRL's stalls.

        A child that is blocked on a full queue does not exit, so the queues are drained. Daemon threads make
        two calls that may block forever: setting an event on which a child waited when it died, and reading a
        message that a killed child did not finish.
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


def make_worker(
    settings: Settings, config: AsyncGRPOConfig, task: Task, *, writer_term: int, progress: Progress | None
) -> ReplicaRolloutWorker:
    """Build the worker that TRL would build from `config`, for the replicas, resuming from `progress`."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    inflight = config.max_inflight_tasks
    if inflight < 0:  # TRL's own rule: no more samples than can be trained on before they are too old
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        inflight = max(config.max_staleness, 1) * batch
    same = (  # options that TRL's worker calls by the same names
        "num_generations queue_maxsize temperature top_p top_k min_p repetition_penalty request_timeout"
        " chat_template_kwargs max_tool_calling_iterations log_completions num_completions_to_print"
        " fork_threshold_tokens"
    )
    return ReplicaRolloutWorker(
        replicas=settings.replicas,
        writer_term=writer_term,
        prompts=progress.prompts if progress else 0,
        later=progress.later if progress else (),
        model_name=MODEL_NAME,
        dataset=task.dataset,
        reward_funcs=task.reward_funcs,
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        environment_factory=task.environment,
        max_inflight_tasks=inflight,
        max_tokens=config.max_completion_length,
        **{name: getattr(config, name) for name in same.split()},
    )
