"""Commits between two engine steps, as one uninterrupted action: no `pause_generation`, no preemption.

vLLM handles `collective_rpc` between two steps, so a call with op "commit" needs no pause. If all workers
succeed, more happens between the same two steps. (vLLM itself does them only in a pause.)

- Cached prefixes are forgotten. Running requests keep their keys and values (as in PipelineRL), but from then
  on, each running request hashes its blocks with its own secret salt. So new requests find no keys and values
  of older weights, neither cached before the commit nor added later by a running request.
- Encoded images and other media are forgotten, so that new requests, and running ones that have not read them
  yet, encode them with the new weights.
- The label of new tokens changes. With async scheduling, a step may be under way on the device. Its results
  were computed with the old weights and keep the old label.

A commit needs three ops (see `worker`): "stage" begins to prepare it while vLLM generates, "staged" asks
whether the preparation is done, and "commit" writes. Each call of `collective_rpc` is slow, whatever its op,
because the call waits for the API server's event loop twice and for the current step once. So if the worker
is in the engine's process, a single call does all three: "stage" with the argument `then`, which holds the
arguments of "commit". This call returns a `Future`, so that vLLM's steps go on. Once the preparation is done,
the engine commits after the current step, and the call's answer has the fields of all three answers.

The module patches vLLM's `EngineCore`; `hooks` names the code that the patch relies on. Before the
first commit, `hindrance` tests the patch on the engine's own cache, and refuses engines that keep old results
elsewhere. The patches upstream/vllm/0001 and 0002 would let vLLM do all this without this module.
"""

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from delta_weight_sync.errors import CommitError
from delta_weight_sync.vllm import METHOD, hooks, takes_images

_RUN = "delta_weight_sync"  # our type of request, made only in this process; its content is a function
# Our attribute of the engine core: versions of the steps that were running at the last commit, oldest first.
_STALE = "_versions_of_running_steps"
_PLAIN = EngineCore.collective_rpc
_PLAIN_HANDLE = EngineCoreProc._handle_client_request

Answers = list[dict[str, Any]]
"""The answers of all workers, one each."""


def install() -> None:
    """Patch this process's `EngineCore`, and the labelling of tokens if this vLLM has it."""
    EngineCore.collective_rpc = _collective_rpc
    EngineCoreProc._handle_client_request = _handle_client_request
    if hooks.LABELS.works():
        EngineCore._attach_weight_version = _label_outputs


def _handle_client_request(core: EngineCore, request_type: Any, request: Any) -> Any:
    return request() if request_type is _RUN else _PLAIN_HANDLE(core, request_type, request)


@functools.wraps(_PLAIN)
def _collective_rpc(
    core: EngineCore, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> Any:
    given = kwargs or {}
    op = given.get("op") if method == METHOD else None
    then = given.pop("then", None) if op == "stage" else None
    call = functools.partial(_PLAIN, core, method, timeout, args, kwargs)
    if op in ("warm", "learn") and (refused := hindrance(core)):
        return [{"error": refused, "kind": CommitError.kind}]
    if op == "stage" and isinstance(core.model_executor, UniProcExecutor):
        finish = then and functools.partial(_collective_rpc, core, METHOD, None, (), then)
        return _when_staged(core, call, finish)
    return commit(core, call, given["label"]) if op == "commit" else call()


def _when_staged(
    core: EngineCore, call: Callable[[], Answers], finish: Callable[[], Answers] | None
) -> Answers | Future[Answers]:
    """Begin to stage. When staging is done, the future gets the worker's "staged" answer, merged with the
    answer of `finish`, if given."""
    answers = call()
    if "error" in answers[0]:
        return answers
    later = Future[Answers]()

    def staged(staging: Future[dict[str, Any]]) -> None:
        if finish and "error" not in staging.result():
            core.input_queue.put_nowait((_RUN, lambda: _settle(later, staging.result(), finish)))
        else:
            later.set_result([staging.result()])

    core.model_executor.driver_worker.worker._delta_worker.staging.add_done_callback(staged)
    return later


def _settle(later: Future[Answers], staged: dict[str, Any], finish: Callable[[], Answers]) -> None:
    try:
        later.set_result([staged | answer for answer in finish()])
    except Exception as error:  # noqa: BLE001 - as vLLM does for every call
        later.set_exception(error)


def commit(core: EngineCore, write: Callable[[], Answers], label: str) -> Answers:
    """Run `write` on all workers. If none fails, forget prefixes, relabel, and add "pause_s" to answer 0."""
    started = time.perf_counter()
    answers = write()
    if any("error" in answer for answer in answers):
        return answers
    forget_prefixes(core.scheduler.kv_cache_manager, core.scheduler.requests.values())
    if takes_images(core.vllm_config.model_config):
        # `EngineCore.reset_encoder_cache` does the same, but warns if requests are running. vLLM's scheduler
        # encodes again what it needs, as after it has evicted an image.
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
    # `batch_queue` holds the steps under way. If some began before an earlier commit, `stale` already has
    # their labels. The others began after that commit: add, for each of them, the label that is replaced now.
    stale: deque[str] = vars(core).setdefault(_STALE, deque())
    stale.extend([core._weight_version] * (len(core.batch_queue or ()) - len(stale)))
    core._weight_version = label
    # Waiting for the step under way is no pause. So the pause begins when the first worker ends its wait.
    answers[0]["pause_s"] = time.perf_counter() - started - min(answer["waited_s"] for answer in answers)
    return answers


def _label_outputs(core: EngineCore, outputs: dict[int, Any]) -> None:
    """Replaces `_attach_weight_version`, which vLLM calls once for each finished step, in order."""
    stale = vars(core).get(_STALE)
    version = stale.popleft() if stale else core._weight_version
    for output in outputs.values():
        output.weight_version = version


def forget_prefixes(manager: KVCacheManager, requests: Iterable[Request]) -> None:
    """Make new requests reuse no block that is cached now, and none that one of `requests` fills later."""
    groups = manager.coordinator.single_type_managers
    size = manager.block_pool.hash_block_size
    for pool in {group.block_pool for group in groups}:
        # A block keeps its hash until the pool reuses the block. But vLLM finds blocks only by this map.
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        if pool.enable_kv_cache_events:
            pool.kv_event_queue.append(AllBlocksCleared())
    for request in requests:
        if request.num_computed_tokens:
            # A hash covers the tokens of all blocks up to its own, but not the weights. Without a salt, a new
            # request that begins with the same tokens would find the blocks that this request fills later.
            # The blocks that this request has filled are not added to the map again, so they need no salt.
            # But vLLM computes the hash of the next block from the hash of the last filled block, and
            # therefore that hash gets the salt, too. A salted hash is the salt, then the last 16 bytes of the
            # block's own hash. So a second salt takes the place of the first one.
            salt = os.urandom(16)
            known = request.block_hashes
            request.cache_salt = salt.hex()  # for the first block, if it has no hash yet
            done = (group.num_cached_block.get(request.request_id, 0) * group.block_size for group in groups)
            first = max(0, min(min(done, default=0) // size, len(known)) - 1)
            known[first:] = [salt + each[-16:] for each in known[first:]]


def hindrance(core: EngineCore) -> str:
    """Why this engine would reuse results of old weights; "" if it would not."""
    try:
        # Without a hasher, vLLM caches no prefixes.
        return _other_caches(core) or (_unforgotten(core) if core.request_block_hasher else "")
    except Exception as error:  # noqa: BLE001 - after any error, no commit may be made
        return str(error) or repr(error)


def _other_caches(core: EngineCore) -> str:
    scheduler = core.scheduler
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    problems = {
        "prefixes outside of vLLM; drop --kv-transfer-config": scheduler.connector,
        "encoder results outside of vLLM; drop --ec-transfer-config": scheduler.ec_connector,
        "encoded media in an unknown way; add --language-model-only": takes_images(
            core.vllm_config.model_config
        )
        and not (hooks.MEDIA.works() and type(scheduler.encoder_cache_manager) is EncoderCacheManager),
        "prefixes in an unknown way; serve another model": any(
            type(group.block_pool) is not BlockPool for group in groups
        ),
    }
    found = next((what for what, present in problems.items() if present), "")
    return found and f"this vLLM would reuse results of old weights: it keeps {found}"


def _unforgotten(core: EngineCore) -> str:
    """Test `forget_prefixes` on the engine's own cache, between two steps; "" if it works."""
    manager = core.scheduler.kv_cache_manager
    size = core.scheduler.block_size

    def probe(name: str, length: int) -> Request:
        hasher = core.request_block_hasher
        return Request(f"step-commit-{name}", [0] * length, SamplingParams(), None, block_hasher=hasher)

    def compute(request: Request, tokens: int) -> None:
        manager.allocate_slots(request, tokens)
        request.num_computed_tokens += tokens

    def reused(length: int) -> int:
        return int(manager.get_computed_blocks(probe("seeker", length))[1])

    # All requests have the same tokens. `old` begins before the commit and goes on after. `new` begins later.
    old = probe("old", 2 * size)
    new = probe("new", 2 * size)
    compute(old, 2 * size)
    before = reused(3 * size)
    forget_prefixes(manager, [old])
    after = reused(3 * size)
    compute(new, 2 * size)
    old.append_output_token_ids([0] * size)
    compute(old, size)
    at_end = reused(3 * size + 1)
    for request in (old, new):
        manager.free(request)
    forget_prefixes(manager, [])
    # At the end, a new request may reuse the blocks of `new`, but not the block that `old` filled after that.
    if 0 < before <= 2 * size and after == 0 and 0 < at_end <= 2 * size:
        return ""
    found = f"a test reused {before} tokens before a commit, {after} after it and {at_end} at the end"
    return f"vLLM's prefix cache is full now, or it reuses results of old weights ({found})"
