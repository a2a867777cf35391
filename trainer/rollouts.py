"""Collects rollouts from several replicas and records which sync's weights generated each token.

`ReplicaRolloutWorker` implements TRL's `RolloutWorkerProtocol`, so it needs nothing of TRL's own worker. Its
process runs `ReplicaRolloutLoop`, which plays conversations, chooses a replica for each (and another if the
first fails), scores groups, and labels each sample with the syncs that the replicas report.
"""

import asyncio
import ctypes
import functools
import inspect
import itertools
import multiprocessing
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import numpy as np
from multidict import CIMultiDict, CIMultiDictProxy
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import ConfigError, RolloutError
from delta_weight_sync.ending import end_with_parent
from delta_weight_sync.trl import sampling
from delta_weight_sync.trl.trainer import Progress
from delta_weight_sync.vllm import MODEL_NAME
from trainer import spaces
from trainer.samples import Conversation, MadeBy, TracedSample, Weights, made_by
from trainer.spaces import Fleet, SpacesUnavailableError
from trainer.tasks import Task

_MIN_SYNC = "X-Policy-Min-Sync"  # a header: a replica with weights of an earlier sync refuses the request
_REST_S = 2.0  # seconds in which a replica that failed gets no request
_CONNECT_S = 20.0
_START_S = 300.0  # for the imports of the process, and the task's first environment
_RETRIED = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)
# How vLLM, or a replica Space in front of it, refuses a prompt that leaves no room for an answer.
_FULL = re.compile("maximum context length|max_tokens must be at least 1|The body is too large")
_EMPTY = {"role": "user", "content": ""}  # where an environment gives the prompt


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


def _made_by(headers: Mapping[str, str]) -> list[MadeBy]:
    """Like `made_by`, for a request that may be made again at another replica."""
    try:
        return made_by(headers)
    except ValueError as error:
        raise aiohttp.ClientError(str(error)) from error


def _read_choice(answer: dict[str, Any]) -> tuple[list[int], list[float], bool]:
    """The tokens of a replica's answer, their log-probabilities, and whether the limit of tokens ended it."""
    try:
        (choice,) = answer["choices"]
        ids = list[int](choice["token_ids"])
        log_probs = list[float](choice["logprobs"]["token_logprobs"])
    except (LookupError, TypeError, ValueError) as error:
        lacks = "its answer lacks tokens or their log-probabilities: is it vLLM?"
        raise aiohttp.ClientError(lacks) from error
    if len(ids) != len(log_probs):
        raise aiohttp.ClientError(f"{len(ids)} tokens have {len(log_probs)} log-probabilities")
    return ids, log_probs, choice.get("finish_reason") == "length"


@dataclass
class Group:
    """The conversations about one row of the data set."""

    number: int
    row: dict[str, Any]
    conversations: list[Conversation] = field(default_factory=list)


class ReplicaRolloutLoop:
    """Plays conversations and puts their samples into a queue; runs in the worker's process.

    Args:
        fleet: The replicas.
        term: This trainer's term as the writer of the run.
        max_staleness: Replicas whose weights are older by more syncs refuse requests.
        progress: Prompts that are finished, and are skipped.
        task: Prompts, and what rewards the answers.
        tokenizer: The policy's.
        config: TRL's options of rollouts by name; see `make_worker`.
        samples: Queue of `TracedSample`.
        metrics: Queue of dictionaries; TRL adds up `*_total`, and averages (sum, count) pairs.
        syncs: Shared memory of the type `Syncs`.
        heartbeat: Shared memory: when the loop last moved, in seconds since 1970.
    """

    session: aiohttp.ClientSession

    def __init__(
        self,
        *,
        fleet: Fleet,
        term: int,
        max_staleness: int,
        progress: Progress | None,
        task: Task,
        tokenizer: Any,
        config: dict[str, Any],
        samples: Any,
        metrics: Any,
        syncs: Any,
        heartbeat: Any,
    ) -> None:
        self._router = Router(fleet)
        self._term = term
        self._max_staleness = max_staleness
        self._prompts, self._later = (progress.prompts, progress.later) if progress else (0, ())
        self._task = task
        self._config = config
        self._samples = samples
        self._metrics = metrics
        self._syncs = syncs
        self._heartbeat = heartbeat
        self._one_group = asyncio.Lock()  # so that functions that reward never run at the same time
        self._reported = time.monotonic()
        # The first environment is made now: it has the names of the tools, and an error here ends the start.
        first: Any = task.environment() if task.environment else None
        self._idle = [] if first is None else [first]  # environments that play no game
        own = ("reset", "get_reward")
        members = inspect.getmembers(type(first), inspect.isfunction)
        self._tools = [name for name, _ in members if name not in own and not name.startswith("_")]
        self._judge = type(first).__name__ if hasattr(first, "get_reward") else ""
        if not task.reward_funcs and not self._judge:
            raise ConfigError(
                "nothing rewards answers: give the task reward_funcs, or get_reward to its environment"
            )
        if not (getattr(tokenizer, "response_template", 0) or getattr(tokenizer, "response_schema", 0)):
            tokenizer = add_response_schema(tokenizer)
        self._template = None
        if self._tools and not is_chat_template_prefix_preserving(tokenizer):
            self._template = get_training_chat_template(tokenizer)
        # Convert tools and template once. In each turn, this would take longer than a request.
        self._schemas = [get_json_schema(getattr(first, name)) for name in self._tools]
        if template := getattr(tokenizer, "response_template", None):
            tokenizer.response_template = load_response_template(template)
        self.tokenizer = tokenizer

    async def run(self) -> None:
        """Play until the task is cancelled, or until a conversation fails."""
        at_once = self._config["max_inflight_tasks"]
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once, "tool"))
        connections = aiohttp.TCPConnector(limit=at_once)
        running = set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(connector=connections) as self.session:
            games = self.games()
            try:
                while True:
                    self._heartbeat.value = time.time()
                    while len(running) < at_once:
                        running.add(asyncio.create_task(self._play(next(games))))
                    done, running = await asyncio.wait(
                        running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def games(self) -> Iterator[Group]:
        """The group of each conversation, in order."""
        rows = self._task.dataset
        for number in itertools.count(self._prompts):
            if number not in self._later:
                group = Group(number, rows[number % len(rows)])
                yield from itertools.repeat(group, self._config["num_generations"])

    async def _play(self, group: Group) -> None:
        """Play one conversation of the group. The last one hands over the group's samples; until then it
        counts as being played, so that rollouts wait for a trainer that is slower."""
        started = time.monotonic()
        spaces.connections.set(self.session)
        environment: Any = None
        if self._task.environment is None:
            prompt = group.row["prompt"]
        else:
            environment = self._idle.pop() if self._idle else self._task.environment()
            prompt = group.row.get("prompt") or [_EMPTY]
            if (seen := await _call(environment.reset, **group.row)) is not None:
                prompt = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + seen}]
        conversation = Conversation(prompt, self._config["fork_threshold_tokens"])
        try:
            cut = await self._converse(conversation, environment)
        finally:
            self._router.ended(conversation.replica)
        if self._judge:
            conversation.reward = await _call(environment.get_reward)
        if environment is not None:
            conversation.rates = dict(self._attribute(environment, "rates") or {})
            self._idle.append(environment)
        self._measure(conversation, time.monotonic() - started, cut)
        group.conversations.append(conversation)
        if len(group.conversations) == self._config["num_generations"]:
            async with self._one_group:
                samples = await self._score(group)
            await self._hand_over(samples)

    async def _converse(self, conversation: Conversation, environment: Any) -> bool:
        """Play all turns. Returns whether the policy wanted to call a tool once too often."""
        tools = {name: getattr(environment, name) for name in self._tools}
        most = self._config["max_tool_calling_iterations"]
        options = {"add_generation_prompt": True, "return_dict": False, "chat_template": self._template}
        options |= {"tools": self._schemas or None, **(self._config["chat_template_kwargs"] or {})}
        while True:
            messages = conversation.prompt + conversation.completion
            prompt = self.tokenizer.apply_chat_template(messages, **options)
            if (ids := await self._ask(conversation, prompt)) is None:
                return False
            said = parse_response(self.tokenizer, ids, prefix=prompt, tools=self._schemas)
            conversation.completion.append(said)
            if (calls := said.get("tool_calls")) is None:
                return False
            if most is not None and conversation.turns > most:
                return True
            for call in calls:
                conversation.completion.append(await self._use_tool(conversation, tools, call["function"]))
            if self._attribute(environment, "done"):
                return False

    def _attribute(self, environment: Any, name: str) -> Any:
        """The environment's attribute; None if there is none, or if it is a tool."""
        return None if name in self._tools else getattr(environment, name, None)

    async def _use_tool(
        self, conversation: Conversation, tools: dict[str, Callable[..., Any]], call: dict[str, Any]
    ) -> dict[str, Any]:
        """The message that tells the policy what its call gave, or why it failed."""
        name = call["name"]
        started = time.monotonic()
        conversation.calls += 1
        found: Any
        try:
            if name not in tools:
                raise LookupError(f"unknown tool {name}")
            found = await _call(tools[name], **call.get("arguments", {}))
        except ConfigError:  # of the environment, whatever the policy calls
            raise
        except Exception as error:  # noqa: BLE001 - the policy's call may be anything
            conversation.failures += 1
            found = {"error": str(error)}
        self._metrics.put({"tools/latency_s": (time.monotonic() - started, 1)})
        return {"role": "tool", "name": name, "content": str(found)}

    def _measure(self, conversation: Conversation, duration_s: float, cut: bool) -> None:
        clock = time.monotonic()
        length = len(conversation.ids)
        metrics: dict[str, float | tuple[float, float]] = {
            "completions/mean_length": (length, 1),
            "completions/max_length": float(length),
            "completions/min_length": float(length),
            "rollout/duration_s": duration_s,
            "rollout/turns_mean": (conversation.turns, 1),
            "rollout/turns_max": float(conversation.turns),
            "rollout/samples_per_rollout": (len(conversation.rows), 1),
            "rollout/generated_tok_s": (length, clock - self._reported),
        }
        if length:
            metrics["completions/clipped_ratio"] = (conversation.cut_off, 1)
        if self._tools:
            metrics["tools/loop_exhausted_frac"] = (cut, 1)
        self._reported = clock
        self._metrics.put(metrics)

    async def _score(self, group: Group) -> list[TracedSample]:
        """Reward all conversations of the group, and make their samples. A conversation without any reward
        has no advantage, and does not count in those of the others."""
        played = group.conversations
        columns: dict[str, Any] = {
            name: [value] * len(played)
            for name, value in group.row.items()
            if name not in ("prompt", "completion", "completion_ids")
        }
        columns["prompts"] = [conversation.prompt for conversation in played]
        columns["completions"] = [conversation.completion for conversation in played]
        columns["completion_ids"] = [conversation.ids for conversation in played]
        found = {_name(reward): await _call(reward, **columns) for reward in self._task.reward_funcs}
        if self._judge:
            found[self._judge] = [conversation.reward for conversation in played]
        table = np.array([*found.values()], dtype=float)  # None becomes NaN
        total = np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0))
        scored = total[~np.isnan(total)]
        mean = scored.mean() if scored.size else np.nan
        deviation = scored.std() if scored.size else np.nan
        advantages = np.nan_to_num((total - mean) / (deviation + 1e-8))
        used = any(conversation.calls for conversation in played)
        samples = []
        for conversation, advantage, reward, parts in zip(played, advantages, total, table.T, strict=True):
            metrics = {"reward": float(reward), "reward_std": float(deviation)}
            metrics |= {f"rewards/{name}": float(part) for name, part in zip(found, parts, strict=True)}
            if used:
                metrics["tools/call_frequency"] = float(conversation.calls)
                metrics["tools/failure_frequency"] = conversation.failures / max(conversation.calls, 1)
            samples += [
                TracedSample(
                    prompt=conversation.prompt,
                    completion=conversation.completion,
                    input_ids=np.array(row.tokens, np.int64),
                    completion_mask=np.array(row.mask, np.int64),
                    old_log_probs=np.array(row.log_probs, np.float32),
                    advantage=float(advantage),
                    model_version=conversation.oldest,
                    group_id=group.number,
                    metrics=metrics,
                    token_syncs=np.array(row.syncs, np.int64),
                    rates=conversation.rates if row is conversation.rows[-1] else {},
                )
                for row in conversation.rows
                if any(row.mask)
            ]
        return samples

    async def _hand_over(self, samples: list[TracedSample]) -> None:
        if self._config["log_completions"]:
            for sample in samples[: self._config["num_completions_to_print"]]:
                said = [sample.prompt[-1], *sample.completion]
                print(f"reward {sample.metrics['reward']}: {said}", flush=True)
        for sample in samples:
            sample.enqueued_at = time.time()
            while True:
                try:
                    self._samples.put_nowait(sample)
                    break
                except queue.Full:
                    await asyncio.sleep(0.1)

    async def _ask(self, conversation: Conversation, prompt: list[int]) -> list[int] | None:
        """Let a replica write the next turn; return its tokens, or None if they do not fit its context."""
        deadline = time.monotonic() + spaces.WAIT_LIMIT_S
        # A seed, because vLLM's engines would otherwise draw the same numbers, and so write the same text.
        payload = self._config["request"] | {"prompt": prompt, "seed": random.getrandbits(63)}
        failed = False
        while True:
            conversation.replica, wait_s = self._router.choose(conversation.replica, failed)
            await asyncio.sleep(wait_s)
            url = conversation.replica
            try:
                answer, headers = await self._request(f"{url}/v1/completions", payload)
                mode = {"logprobs_mode": headers.get(sampling.HEADER)}
                if problem := sampling.problem(payload, url, mode):  # of a replica that joined late, perhaps
                    raise aiohttp.ClientError(problem)
                entries = _made_by(headers)
                last = self._last_known_sync(entries[0]["weights"] if entries else None)
                ids, log_probs, conversation.cut_off = _read_choice(answer)
                conversation.add_turn(prompt, ids, log_probs, entries, last)
                return ids
            except _RETRIED as error:
                status = getattr(error, "status", 0)
                if conversation.turns and status in (400, 413) and _FULL.search(str(error)):
                    conversation.cut_off = True
                    return None
                # Most statuses from 400 to 499 are final. Otherwise, try again: the replica may be waking up.
                retried = status in (408, 425, 429) or spaces.is_ended_job(url, status)
                if 400 <= status < 500 and not retried:
                    raise RolloutError(f"{url} refused a rollout's request: {error}") from error
                if time.monotonic() > deadline:
                    raise SpacesUnavailableError(f"{url} does not answer: {error}") from error
                self._metrics.put({"rollout/vllm_retry_total": 1.0})
                failed = True

    def _last_known_sync(self, oldest: Weights | None) -> int:
        """The last sync whose weights this trainer had, too. `oldest`: the answer's oldest weights, None if
        they were never published. Raises `ClientError` if they are of another run."""
        syncs = self._syncs
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

    async def _request(self, url: str, payload: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
        # A replica with older weights would only make samples that the trainer drops.
        oldest = max(0, self._syncs.value - self._max_staleness)
        headers = {_MIN_SYNC: str(oldest), **spaces.headers(url)}
        limits = aiohttp.ClientTimeout(self._config["request_timeout"], sock_connect=_CONNECT_S)
        # No redirects, because they would carry the key to another host.
        options: dict[str, Any] = {"json": payload, "headers": headers, "allow_redirects": False}
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


class ReplicaRolloutWorker:
    """TRL's `RolloutWorkerProtocol`: starts and ends the process that runs `ReplicaRolloutLoop`.

    Args:
        queue_maxsize: Samples that wait for the trainer at most; 0 for no limit.
        nice: How far to lower the priority of the process.
        **options: Arguments of `ReplicaRolloutLoop`, which are pickled.
    """

    def __init__(self, queue_maxsize: int = 0, nice: int = 0, **options: Any) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self.rollout_buffer: Any = self._spawn.Queue(queue_maxsize)
        self.metrics_queue: Any = self._spawn.Queue()
        self._syncs: Any = self._spawn.Value(Syncs)
        self._heartbeat = self._spawn.Value("d")
        self._nice = nice
        self._options = options
        self._process: Any = None
        self._messages: Any = None

    def inherit(self, sync: int) -> None:
        """Accept the earlier trainer's syncs up to `sync`: at these, both trainers had the same weights."""
        self._syncs.inherited = sync

    def update_model_version(self, model_version: int) -> None:
        """Note the trainer's newest sync."""
        self._syncs.value = model_version

    def start(self) -> None:
        """Start the process. Raises `RolloutError` with the cause if that fails."""
        self._heartbeat.value = time.time()
        self._messages, messages = self._spawn.Pipe(duplex=False)
        shared = {"samples": self.rollout_buffer, "metrics": self.metrics_queue, "syncs": self._syncs}
        shared["heartbeat"] = self._heartbeat
        arguments = (messages, self._nice, self._options | shared)
        self._process = self._spawn.Process(target=_work, args=arguments, name="rollouts", daemon=True)
        self._process.start()
        messages.close()  # only the process holds this end now, so its end is seen here
        try:
            cause = self._messages.recv() if self._messages.poll(_START_S) else f"it took {_START_S:.0f} s"
        except EOFError:
            cause = self._failure()
        if cause:
            raise RolloutError(f"the process that collects rollouts did not start: {cause}")

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RolloutError` with the cause if the process failed or hangs."""
        cause = self._failure()
        if not cause and (age := time.time() - self._heartbeat.value) > stale_after_s:
            cause = f"it has not moved for {age:.0f} s"
        if cause:
            raise RolloutError(f"the process that collects rollouts failed: {cause}")

    def stop(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.join()
            self._process = None

    def _failure(self) -> str:
        """Why the process failed; "" if it did not."""
        try:
            while self._messages.poll():
                if cause := self._messages.recv():
                    return str(cause)
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            if code == -signal.SIGKILL:
                return "it was killed, perhaps because the memory is full"
            if code != -signal.SIGTERM:  # perhaps the trainer was sent the same signal
                return f"it ended with exit code {code}"
        return ""


def _work(messages: Any, nice: int, options: dict[str, Any]) -> None:
    """The main function of the process. Sends "" when the loop begins, and the cause if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the trainer ends this process (`stop`)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # rollouts need no GPU memory
    os.nice(nice)
    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()

    async def run() -> None:
        loop = ReplicaRolloutLoop(**options)
        messages.send("")
        await loop.run()

    try:
        asyncio.run(run())
    except Exception as error:
        messages.send(f"{type(error).__name__}: {error}")
        raise


async def _call(function: Callable[..., Any], **options: Any) -> Any:
    """Call a function in a thread, or await it if it is asynchronous."""
    if not inspect.iscoroutinefunction(function):
        function = functools.partial(asyncio.to_thread, function)
    found = await function(**options)
    return await found if inspect.isawaitable(found) else found  # of an object whose `__call__` is async


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a `partial`
    return str(getattr(function, "__name__", type(function).__name__))


def require_exact_ratios(fleet: Fleet, config: AsyncGRPOConfig) -> None:
    """Raise `ConfigError` if a replica's log-probabilities would make importance ratios wrong."""
    for url in fleet.urls():
        try:
            report = spaces.request(url, "GET", "/status").raise_for_status().json()
        except (httpx.HTTPError, ValueError):  # not up yet; each of its answers will be checked
            continue
        settings = vars(config) | sampling.NEUTRAL  # as `make_worker` sets them
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
    request = {
        name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")
    }
    request |= {"model": MODEL_NAME, "max_tokens": config.max_completion_length, "n": 1}
    request |= {"return_token_ids": True, "logprobs": 0}
    # Without these, vLLM would take values from the model's generation_config.json.
    request |= sampling.NEUTRAL | ({} if config.min_p is None else {"min_p": config.min_p})
    same = (
        "num_generations request_timeout chat_template_kwargs max_tool_calling_iterations log_completions"
        " num_completions_to_print fork_threshold_tokens"
    )
    return ReplicaRolloutWorker(
        config.queue_maxsize,
        # A trainer on a CPU shares its cores with rollouts. Rollouts can wait, but a sync should not.
        nice=10 if config.use_cpu else 0,
        fleet=fleet,
        term=term,
        max_staleness=config.max_staleness,
        progress=progress,
        task=task,
        tokenizer=tokenizer,
        config={name: getattr(config, name) for name in same.split()}
        | {"request": request, "max_inflight_tasks": inflight},
    )
