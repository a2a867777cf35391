"""Collects rollouts from several replicas and records which sync's weights generated each token.

This module extends TRL's rollout worker. The extended worker chooses a replica for each rollout, changes to
another replica if the first fails, and labels each sample with the syncs that the replicas report.
"""

import asyncio
import contextvars
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NotRequired, TypedDict

import aiohttp
import httpx
import numpy as np
from multidict import CIMultiDict, CIMultiDictProxy
from numpy.typing import NDArray
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, TurnRecord

from delta_weight_sync import ConfigError, RolloutError
from delta_weight_sync.trl import sampling
from delta_weight_sync.trl.trainer import Progress
from delta_weight_sync.vllm import MODEL_NAME
from trainer import spaces
from trainer.spaces import Fleet, SpacesUnavailableError
from trainer.tasks import Task

UNKNOWN = -1  # the sync of tokens that the policy did not generate, or whose sync is not known for sure
TokenSyncs = NDArray[np.int64]
_MIN_SYNC = "X-Policy-Min-Sync"  # a header: a replica with weights of an earlier sync refuses the request
_REST_S = 2.0  # seconds in which a replica that failed gets no request
_CONNECT_S = 20.0
_RETRIED = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


@dataclass(slots=True, kw_only=True)
class TracedSample(RolloutSample):
    """TRL's sample, with the sync whose weights generated each token, or `UNKNOWN`: int64 [tokens]."""

    token_syncs: TokenSyncs


class Router:
    """Chooses a replica for each request of a conversation.

    A conversation begins at the replica with the fewest conversations, and stays there, because the earlier
    turns are in the prefix cache of that replica. If the replica fails or is removed, the conversation goes
    on at another replica that answers, if any does. Nothing is lost, because each request contains the whole
    conversation.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._busy = Counter[str]()  # conversations at each replica
        self._until = defaultdict[str, float](float)  # when a replica that failed may be asked again

    def choose(self, current: str, failed: bool = False) -> tuple[str, float]:
        """Return the replica for a conversation's next request, and the seconds to wait before that request.

        `current`: the replica of the last request ("" before the first). `failed`: whether it failed.
        """
        clock = time.monotonic()
        urls = self._fleet.urls()
        if failed:
            self._until[current] = clock + _REST_S
        if current in urls and self._until[current] <= clock:
            return current, 0.0
        self._busy[current] -= 1
        found = min(urls, key=lambda url: (max(self._until[url], clock), self._busy[url], random.random()))
        self._busy[found] += 1
        return found, max(0.0, self._until[found] - clock)

    def ended(self, url: str) -> None:
        self._busy[url] -= 1


class Weights(TypedDict):
    """Which published weights made an answer, as the label of their tokens says."""

    version: int
    term: int
    sync: int


class MadeBy(TypedDict):
    """Weights, and the tokens that they made: number of the choice, first token, token after the last.
    Without `tokens`, these weights or newer ones made the whole answer."""

    weights: Weights
    tokens: NotRequired[list[tuple[int, int, int]]]


def made_by(headers: Mapping[str, str]) -> list[MadeBy]:
    """Read which published weights made a replica's answer from its headers; the oldest come first.

    Raises `ValueError` if the header has another form, as of another release.
    """
    text = headers.get("x-policy-versions", "[]")
    try:
        published = [entry for entry in json.loads(text) if entry["weights"]]
        return sorted(published, key=lambda entry: int(entry["weights"]["version"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"its header x-policy-versions is of another release: {text[:100]!r}") from error


def _made_by(headers: Mapping[str, str]) -> list[MadeBy]:
    """Like `made_by`, for a request that may be made again at another replica."""
    try:
        return made_by(headers)
    except ValueError as error:
        raise aiohttp.ClientError(str(error)) from error


class Conversation:
    """The replica of one conversation, and the syncs whose weights generated its answers."""

    def __init__(self) -> None:
        self.replica = ""  # the replica that got the last request
        self._oldest: list[int] = []  # for each answer: the oldest sync whose weights generated a token
        # These turns have syncs in place of log-probabilities. When TRL's code makes samples of the turns, it
        # puts the sync of each token where it would put the token's log-probability.
        self._turns: list[TurnRecord] = []

    def add_turn(self, prompt: list[int], output: list[int], entries: list[MadeBy], last: int) -> None:
        """Record an answer and the weights that made it. This trainer has the weights of syncs up to `last`.
        Tokens of later syncs stay `UNKNOWN`. In the age of the answer, they count as `last`."""
        syncs = np.full(len(output), UNKNOWN)
        for entry in entries:
            for _, start, end in entry.get("tokens", ()):  # requests ask for one choice
                if entry["weights"]["sync"] <= last:
                    syncs[start:end] = entry["weights"]["sync"]
        self._oldest.append(min(entries[0]["weights"]["sync"] if entries else 0, last))
        self._turns.append(TurnRecord(prompt, output, syncs.tolist()))

    def rows(self, fork_threshold: int) -> list[tuple[int, TokenSyncs]]:
        """For each sample that TRL makes: the conversation's oldest sync, and the sync of each token."""
        sequences, _ = trl_worker._chain_to_sequences(self._turns, "", fork_threshold)
        found = [(np.array(s.completion_mask) == 1, np.array(s.old_log_probs)) for s in sequences]
        return [(min(self._oldest), np.where(own, syncs, UNKNOWN).astype(np.int64)) for own, syncs in found]


_conversation: contextvars.ContextVar[Conversation] = contextvars.ContextVar("conversation")


class ReplicaRolloutLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop, which runs in a child process. Here a sample's `model_version` is the oldest sync whose
    weights generated a token of the conversation. TRL would set `model_version` to the sync that is newest
    when the sample's group begins."""

    _env_tools: dict[str, Any]

    def __init__(
        self,
        fleet: Fleet,
        term: int,
        max_staleness: int,
        progress: Progress | None,
        nice: int,
        fork_threshold_tokens: int = 1024,  # as in TRL
        **kwargs: Any,
    ) -> None:
        """Skips the finished prompts of `progress`. `nice`: how far to lower this process's priority."""
        os.nice(nice)
        self._router = Router(fleet)
        self._term = term
        self._max_staleness = max_staleness
        self._prompts, self._later = (progress.prompts, progress.later) if progress else (0, ())
        self._rows: dict[str, list[tuple[int, TokenSyncs]]] = {}  # by rollout id, until the rollout is scored
        self._forks_at = fork_threshold_tokens
        super().__init__(fork_threshold_tokens=fork_threshold_tokens, **kwargs)
        # Convert tools and template once. TRL would do this in each turn, which takes longer than a request.
        if self.environment_factories is not None:
            self._env_tools = {name: [*map(get_json_schema, t)] for name, t in self._env_tools.items()}
        if template := getattr(self.tokenizer, "response_template", None):
            self.tokenizer.response_template = load_response_template(template)

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for group_id in itertools.count(self._prompts):
            if group_id not in self._later:
                row = self.dataset[group_id % len(self.dataset)]
                yield from itertools.repeat((group_id, row), self.num_generations)

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        conversation = Conversation()
        _conversation.set(conversation)  # each conversation has its own asyncio task, and so its own context
        spaces.connections.set(self.session)
        try:
            rollout = await super()._generate_one(prompt, tool_dict, tools, group_id)
        finally:
            self._router.ended(conversation.replica)
        if sequences := rollout[2]:
            self._rows[sequences[0].rollout_id] = conversation.rows(self._forks_at)
        return rollout

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        ids = [sequences[0].rollout_id for sequences in group.completions_sequences if sequences]
        rows = [row for rollout_id in ids for row in self._rows.pop(rollout_id)]
        traced = []
        for sample, (oldest, syncs) in zip(samples, rows, strict=True):
            known = {field.name: getattr(sample, field.name) for field in fields(RolloutSample)}
            traced.append(TracedSample(**known | {"model_version": oldest}, token_syncs=syncs))
        return traced

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        deadline = time.monotonic() + spaces.WAIT_LIMIT_S
        conversation = _conversation.get()
        # Without these, vLLM would take values from the model's generation_config.json.
        payload = sampling.NEUTRAL | payload
        failed = False
        while True:
            conversation.replica, wait_s = self._router.choose(conversation.replica, failed)
            await asyncio.sleep(wait_s)
            url = conversation.replica
            try:
                answer, headers = await self._request(f"{url}{path}", payload, timeout)
                mode = {"logprobs_mode": headers.get(sampling.HEADER)}
                if problem := sampling.problem(payload, url, mode):  # of a replica that joined late, perhaps
                    raise aiohttp.ClientError(problem)
                entries = _made_by(headers)
                last = self._last_known_sync(entries[0]["weights"] if entries else None)
                conversation.add_turn(payload["prompt"], answer["choices"][0]["token_ids"], entries, last)
                return answer
            except _RETRIED as error:
                status = getattr(error, "status", 0)
                # Most statuses from 400 to 499 are final. Otherwise, try again: the replica may be waking up.
                if 400 <= status < 500 and status not in (408, 425, 429):
                    raise RolloutError(f"{url} refused a rollout's request: {error}") from error
                if time.monotonic() > deadline:
                    raise SpacesUnavailableError(f"{url} does not answer: {error}") from error
                self._counters["rollout/vllm_retry_total"] += 1
                failed = True

    def _last_known_sync(self, oldest: Weights | None) -> int:
        """The last sync whose weights this trainer had, too. `oldest`: the answer's oldest weights, None if
        they were never published. Raises `ClientError` if they are of another run."""
        syncs = self._model_version_value
        if oldest and oldest["term"] == self._term:
            foreign = oldest["sync"] > syncs.value + 1
            last = sys.maxsize
        else:
            # This trainer had the weights of earlier trainers, but not if it is the first or began with
            # `--fresh`. It never had those of another run. For the syncs up to `inherited`, an earlier
            # trainer had the same weights as this trainer.
            inherits = syncs.inherited and oldest and oldest["term"] < self._term
            foreign = bool(oldest) and not inherits
            last = syncs.inherited
        if foreign:
            raise aiohttp.ClientError("its weights are not of this run: set its run to this --run")
        return last

    async def _request(
        self, url: str, payload: dict[str, Any], timeout: float
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        # A replica with older weights would only make samples that the trainer drops.
        oldest = max(0, self._model_version_value.value - self._max_staleness)
        headers = {_MIN_SYNC: str(oldest), **spaces.headers(url)}
        limits = aiohttp.ClientTimeout(timeout, sock_connect=_CONNECT_S)
        # No redirects, because they would carry the key to another host.
        options = {"json": payload, "headers": headers, "allow_redirects": False}
        async with self.session.post(url, timeout=limits, **options) as response:
            if response.status >= 300:
                reason = f"{response.reason}: {(await response.text())[:300]}"
                no_headers = CIMultiDictProxy(CIMultiDict[str]())  # the error must not contain the key
                request = response.request_info._replace(headers=no_headers)
                raise aiohttp.ClientResponseError(request, (), status=response.status, message=reason)
            try:
                answer = await response.json()
            except (ValueError, RecursionError) as error:  # the latter if the answer is nested too deeply
                raise aiohttp.ClientError(f"its answer is not JSON ({type(error).__name__})") from error
            return answer, response.headers


class Syncs(ctypes.Structure):
    """Memory that the child process shares. `value`: this trainer's newest sync. `inherited`: the newest sync
    for which an earlier trainer of the run had the same weights as this trainer."""

    _fields_ = (("value", ctypes.c_int), ("inherited", ctypes.c_int))


class ReplicaRolloutWorker(trl_worker.AsyncRolloutWorker):
    _loop_cls = ReplicaRolloutLoop
    _process: Any
    _model_version_value: Any  # memory of the type `Syncs`

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._model_version_value = multiprocessing.get_context("spawn").Value(Syncs)

    def inherit(self, sync: int) -> None:
        """Accept the earlier trainer's syncs up to `sync`: at these, both trainers had the same weights."""
        self._model_version_value.inherited = sync


def require_exact_ratios(fleet: Fleet, config: AsyncGRPOConfig) -> None:
    """Raise `ConfigError` if a replica's log-probabilities would make importance ratios wrong."""
    for url in fleet.urls():
        try:
            report = spaces.request(url, "GET", "/status").raise_for_status().json()
        except (httpx.HTTPError, ValueError):  # not up yet; each of its answers will be checked
            continue
        settings = vars(config) | sampling.NEUTRAL  # as `_post` sends them
        if report.get("logprobs_mode") != "" and (problem := sampling.problem(settings, url, report)):
            raise ConfigError(problem)


def make_worker(
    model: str, config: AsyncGRPOConfig, task: Task, fleet: Fleet, term: int, progress: Progress | None
) -> ReplicaRolloutWorker:
    """Build a rollout worker for several replicas, with TRL's options in `config`; resume `progress`.
    `term` is this trainer's term as the writer of the run."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    inflight = config.max_inflight_tasks
    if inflight < 0:  # TRL's rule: no more samples than can be trained on before they are too old
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        inflight = max(config.max_staleness, 1) * batch
    same = (  # options with the same name in TRL's worker
        "num_generations queue_maxsize temperature top_p top_k min_p repetition_penalty request_timeout"
        " chat_template_kwargs max_tool_calling_iterations log_completions num_completions_to_print"
        " fork_threshold_tokens"
    )
    return ReplicaRolloutWorker(
        fleet=fleet,
        term=term,
        max_staleness=config.max_staleness,
        progress=progress,
        # A trainer on a CPU shares its cores with rollouts. Rollouts can wait, but a sync should not.
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
