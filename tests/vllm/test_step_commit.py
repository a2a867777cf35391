"""What a commit does to vLLM's own prefix cache: nothing of older weights is ever found by a new request."""

import itertools
import warnings
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of torch that are deprecated
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request, RequestStatus

    from delta_weight_sync.vllm import _step_commit

pytestmark = pytest.mark.live  # vLLM's own cache manager

BLOCK = 16
PLACE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK, **PLACE)
LARGE = FullAttentionSpec(block_size=2 * BLOCK, **PLACE)
SLIDING = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK, **PLACE)
CACHES = {"full": [FULL], "sliding": [SLIDING], "both": [FULL, SLIDING], "two sizes": [LARGE, SLIDING]}
ids = itertools.count()


class Cache:
    """vLLM's cache manager with the few calls that its scheduler makes."""

    def __init__(self, specs: list) -> None:
        init_none_hash(sha256)
        groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)
        largest = max(spec.block_size for spec in specs)
        self.manager = KVCacheManager(config, 4096, scheduler_block_size=largest, hash_block_size=BLOCK)
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def request(self, tokens: list[int]) -> Request:
        name = f"request-{next(ids)}"
        return Request(name, tokens, SamplingParams(max_tokens=4096), None, block_hasher=self.hasher)

    def begin(self, tokens: list[int]) -> Request:
        """Admit a request, with what it finds, and compute its prompt."""
        request = self.request(tokens)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - found, found, blocks) is not None
        request.num_computed_tokens = len(tokens)
        request.status = RequestStatus.RUNNING
        return request

    def generate(self, request: Request, tokens: list[int]) -> None:
        """One token per step."""
        for token in tokens:
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def found(self, tokens: list[int]) -> int:
        """How many tokens of a new request with these tokens, and one more, would come from the cache."""
        return self.manager.get_computed_blocks(self.request([*tokens, 0]))[1]


@pytest.fixture(params=CACHES)
def cache(request):
    return Cache(CACHES[request.param])


TEXT = [7 * i % 1000 for i in range(400)]


def test_nothing_that_was_cached_is_found(cache):
    done = cache.begin(TEXT[:200])
    running = cache.begin(TEXT[100:300])
    cache.manager.free(done)
    assert cache.found(TEXT[:200]) > 0
    assert cache.found(TEXT[100:300]) > 0
    _step_commit.forget_prefixes(cache.manager, [running])
    assert cache.found(TEXT[:200]) == cache.found(TEXT[100:300]) == 0


def test_what_a_running_request_fills_later_is_not_found(cache):
    """Its new blocks stand on old keys and values, though a new request computes the same prefix afresh."""
    running = cache.begin(TEXT[:150])
    _step_commit.forget_prefixes(cache.manager, [running])
    fresh = cache.begin(TEXT[:176])
    cache.generate(running, TEXT[150:300])
    assert 0 < cache.found(TEXT[:300]) <= 176
    cache.manager.free(running)
    cache.manager.free(fresh)
    assert 0 < cache.found(TEXT[:300]) <= 176


def test_a_request_without_a_full_block_is_salted_too(cache):
    running = cache.begin(TEXT[:5])
    _step_commit.forget_prefixes(cache.manager, [running])
    cache.generate(running, TEXT[5:100])
    assert cache.found(TEXT[:100]) == 0


def test_a_prompt_that_is_half_computed_is_salted_too(cache):
    running = cache.request(TEXT[:300])
    cache.manager.allocate_slots(running, 64)
    running.num_computed_tokens = 64
    _step_commit.forget_prefixes(cache.manager, [running])
    cache.begin(TEXT[:96])
    cache.manager.allocate_slots(running, 236)
    assert cache.found(TEXT[:300]) <= 96


def test_of_a_decoding_request_only_the_last_hashes_are_salted(cache):
    """However many tokens it has: the pause does not grow with the tokens in flight."""
    running = cache.begin(TEXT)
    before = list(running.block_hashes)
    _step_commit.forget_prefixes(cache.manager, [running])
    salted = [then != now for then, now in zip(before, running.block_hashes, strict=True)]
    assert len(salted) == 25
    assert 1 <= sum(salted) == sum(salted[-2:])


def test_a_waiting_request_shares_what_it_computes_later(cache):
    waiting = cache.request(TEXT[:200])
    _step_commit.forget_prefixes(cache.manager, [waiting])
    cache.manager.allocate_slots(waiting, 200)
    assert cache.found(TEXT[:200]) > 0


def test_a_preempted_request_begins_anew_and_shares_what_it_computes(cache):
    request = cache.begin(TEXT[:200])
    cache.preempt(request)
    _step_commit.forget_prefixes(cache.manager, [request])
    assert cache.manager.get_computed_blocks(request)[1] == 0
    cache.manager.allocate_slots(request, 200)
    assert cache.found(TEXT[:200]) > 0


def test_a_running_request_keeps_its_blocks_through_many_commits(cache):
    running = [cache.begin(TEXT[:50]), cache.begin(TEXT[:90])]
    before = [cache.manager.get_block_ids(request.request_id) for request in running]
    for i in range(5):
        _step_commit.forget_prefixes(cache.manager, running)
        for request, (first, *_) in zip(running, before, strict=True):
            cache.generate(request, TEXT[90 + i : 92 + i])
            now = cache.manager.get_block_ids(request.request_id)[0]
            assert all(b in (a, 0) for a, b in zip(first, now, strict=False)), "0: it has left the window"
    cache.preempt(running[0])
    _step_commit.forget_prefixes(cache.manager, running)
    assert cache.manager.allocate_slots(running[0], running[0].num_tokens) is not None
    for request in running:
        cache.manager.free(request)
    assert cache.manager.usage == 0


def test_the_cache_survives_being_used_up_after_a_commit(cache):
    """Forgotten blocks are handed out again, also while a new block has the hash that they had."""
    for round_ in range(4):
        for start in range(0, 5000, 500):
            request = cache.begin(list(range(start + round_ % 2, start + 400)))
            if start % 1000:
                cache.manager.free(request)
            else:
                _step_commit.forget_prefixes(cache.manager, [request])
                cache.manager.free(request)
    assert cache.manager.usage == 0


def test_a_stage_is_answered_when_it_is_done():
    """vLLM sends the result of a `Future` when it is there, and goes on with its steps meanwhile."""
    staging = Future()
    done = {"done": True, "stage_s": 1.0}
    refused = {"error": "no such delta"}
    worker = SimpleNamespace(_delta_worker=SimpleNamespace(staging=staging))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker)))
    assert _step_commit._when_staged(core, lambda: [refused], None) == [refused]
    later = _step_commit._when_staged(core, lambda: [{"done": False}], None)
    assert not later.done()
    staging.set_result(done)
    assert later.result(0) == [done]


def test_no_commit_is_made_after_an_error_without_a_message(monkeypatch):
    monkeypatch.setattr(_step_commit, "_other_caches", mock.Mock(side_effect=AssertionError))
    assert _step_commit.hindrance(None) == "AssertionError()"
