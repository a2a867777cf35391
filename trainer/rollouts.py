"""Collects rollouts from several replicas and records which sync's weights generated each token.

This adapts TRL's rollout worker: it spreads requests over the replicas, which may be asleep, and labels each
sample with the syncs that the replicas report.
"""

import asyncio
import contextvars
import ctypes
import itertools
import os
import random
import re
import time
from collections.abc import Iterator, Mapping
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

from delta_weight_sync import RolloutError
from delta_weight_sync.trl.trainer import Progress
from trainer import spaces
from trainer.settings import Settings
from trainer.spaces import SpacesUnavailableError
from trainer.tasks import Task

MODEL_NAME = "policy"  # the name under which every replica serves its model
UNKNOWN = -1  # the sync of tokens that the policy did not generate, or whose sync no replica reported
TokenSyncs = NDArray[np.int64]
_SPAN = re.compile(r"(\d+):(\d+)-(\d+)", re.ASCII)
_RETRIED = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


@dataclass(slots=True, kw_only=True)
class TracedSample(RolloutSample):
    """TRL's sample, and the sync whose weights generated each of its tokens: int64 [tokens]."""

    token_syncs: TokenSyncs


class Conversation:
    """The syncs whose weights generated the answers of one conversation, as the replicas report them."""

    def __init__(self) -> None:
        self._oldest: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        self._turns: list[TurnRecord] = []  # with syncs in place of log-probabilities

    def add_headers(self, headers: Mapping[str, str], writer_term: int, inherited: int) -> None:
        """Record the headers of an answer. Call `add_turn` with its tokens next.

        `writer_term` is this trainer's. An earlier trainer's syncs count only up to `inherited`, because both
        trainers had the same weights up to that sync.
        """
        oldest = int(headers.get("x-policy-sync", 0))
        first_choice = headers.get("x-policy-syncs", "").split(";")[0]  # requests ask for one choice
        self._spans = [(int(sync), int(start), int(end)) for sync, start, end in _SPAN.findall(first_choice)]
        if int(headers.get("x-policy-term", -1)) != writer_term:
            oldest = min(oldest, inherited)
            self._spans = [span for span in self._spans if span[0] <= inherited]
        self._oldest.append(oldest)

    def add_turn(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        syncs = np.full(len(output_ids), UNKNOWN)
        for sync, start, end in self._spans:
            syncs[start:end] = sync
        self._turns.append(TurnRecord(prompt_ids, output_ids, syncs.tolist()))

    def rows(self, fork_threshold: int) -> list[tuple[int, TokenSyncs]]:
        """For each sample that TRL makes: the conversation's oldest sync, and the sync of each token."""
        sequences, _ = trl_worker._chain_to_sequences(self._turns, "", fork_threshold)
        found = [(np.array(s.completion_mask) == 1, np.array(s.old_log_probs)) for s in sequences]
        return [(min(self._oldest), np.where(own, syncs, UNKNOWN).astype(np.int64)) for own, syncs in found]


_conversation: contextvars.ContextVar[Conversation] = contextvars.ContextVar("conversation")


class ReplicaRolloutLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop in its child process. A sample's `model_version` is the sync of the oldest weights that
    generated a token of its conversation. TRL would use the trainer's sync when the sample's group began."""

    _env_tools: dict[str, Any]

    def __init__(
        self, *, replicas: list[str], writer_term: int, progress: Progress | None, nice: int, **kwargs: Any
    ) -> None:
        """Skips the finished prompts of `progress`. `nice`: how far to lower this process's priority."""
        os.nice(nice)
        self._replicas, self._writer_term = replicas, writer_term
        self._prompts, self._later = (progress.prompts, progress.later) if progress else (0, ())
        self._rows: dict[str, list[tuple[int, TokenSyncs]]] = {}  # rollout id -> rows, until it is scored
        super().__init__(**kwargs)
        # TRL would do this in each turn, which takes longer than a request.
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
        _conversation.set(conversation)  # each conversation has its own task, and so its own context
        spaces.connections.set(self.session)
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
        urls = itertools.cycle(random.sample(self._replicas, len(self._replicas)))
        while True:
            url = next(urls)
            try:
                return await self._request(f"{url}{path}", payload, timeout)
            except _RETRIED as error:
                status = getattr(error, "status", 0)
                # Other statuses may come from a replica that is waking up: try again.
                if 400 <= status < 500 and status != 429:
                    raise RolloutError(f"{url} refused a rollout's request: {error}") from error
                if time.monotonic() > deadline:
                    raise SpacesUnavailableError(f"{url} does not answer: {error}") from error
                self._counters["rollout/vllm_retry_total"] += 1
                await asyncio.sleep(1.0)

    async def _request(self, url: str, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        # No redirects, because they would carry the key to another host.
        options = {"json": payload, "headers": spaces.headers(url), "allow_redirects": False}
        async with self.session.post(url, timeout=aiohttp.ClientTimeout(timeout), **options) as response:
            if response.status >= 300:
                reason = f"{response.reason}: {(await response.text())[:300]}"
                no_headers = CIMultiDictProxy(CIMultiDict[str]())  # the error must not contain the key
                request = response.request_info._replace(headers=no_headers)
                raise aiohttp.ClientResponseError(request, (), status=response.status, message=reason)
            inherited = self._model_version_value.inherited
            _conversation.get().add_headers(response.headers, self._writer_term, inherited)
            answer: dict[str, Any] = await response.json()
            return answer


class Syncs(ctypes.Structure):
    """Shared with the child process: the trainer's newest sync, and the newest sync that it inherited."""

    _fields_ = (("value", ctypes.c_int), ("inherited", ctypes.c_int))


class ReplicaRolloutWorker(trl_worker.AsyncRolloutWorker):
    _loop_cls = ReplicaRolloutLoop
    _process: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._model_version_value = self._mp_ctx.Value(Syncs)

    def inherit(self, sync: int) -> None:
        """Accept syncs of the run's earlier trainer up to this one, which both trainers have made."""
        self._model_version_value.inherited = sync


def make_worker(
    settings: Settings, config: AsyncGRPOConfig, task: Task, *, writer_term: int, progress: Progress | None
) -> ReplicaRolloutWorker:
    """Build TRL's worker from `config`, but for several replicas. It resumes from `progress`."""
    tokenizer, inflight = AutoTokenizer.from_pretrained(settings.model), config.max_inflight_tasks
    if inflight < 0:  # TRL's rule: no more samples than it can train on before they are too old
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        inflight = max(config.max_staleness, 1) * batch
    same = (  # options with the same name in TRL's worker
        "num_generations queue_maxsize temperature top_p top_k min_p repetition_penalty request_timeout"
        " chat_template_kwargs max_tool_calling_iterations log_completions num_completions_to_print"
        " fork_threshold_tokens"
    )
    return ReplicaRolloutWorker(
        replicas=settings.replicas,
        writer_term=writer_term,
        progress=progress,
        # A trainer on a CPU shares its cores with rollouts. They can wait, but a sync should not.
        nice=10 if config.use_cpu else 0,
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
