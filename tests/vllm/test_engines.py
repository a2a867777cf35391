"""A vLLM of several engines answers as one: none may be left behind unseen.

Its client is stood in for, as an engine has to fail; tests/live/test_parallel.py has real ones.
"""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from delta_weight_sync.errors import EngineError
from delta_weight_sync.vllm.engine import Engine

Answer = dict[str, Any]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def engine(loop: asyncio.AbstractEventLoop, answers: dict[str, list[list[list[Answer]]]]) -> Engine:
    """`answers`: of each operation, one after the other: engines, and their workers."""

    async def call_all(utility: str, method: str, timeout: None, args: tuple[()], kwargs: Any) -> Any:
        given = answers[kwargs["op"]]
        return given.pop(0) if len(given) > 1 else given[0]

    return Engine(SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_all)), loop)


def test_what_one_of_them_refuses_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    refusal = {"error": "another digest", "kind": "codec"}
    fine = {"commit_s": 0.1, "waited_s": 0.0, "pause_s": 0.2}
    with pytest.raises(EngineError, match="another digest") as caught:
        engine(loop, {"commit": [[[fine], [refusal]]]}).commit("0" * 16, "1.1.1")
    assert caught.value.kind == "codec"


def test_a_version_is_staged_when_all_have_staged_it(loop: asyncio.AbstractEventLoop) -> None:
    done, busy = {"done": True, "stage_s": 1.0}, {"done": False}
    later = {"done": True, "stage_s": 2.0}
    staged = [[[done], [busy]], [[done], [busy]], [[done], [later]]]
    assert engine(loop, {"stage": [[[{}], [{}]]], "staged": staged}).stage([]) == 2.0
    assert len(staged) == 1, "it asked until the last one was done"


def test_the_pause_is_the_longest(loop: asyncio.AbstractEventLoop) -> None:
    first = {"commit_s": 0.1, "waited_s": 0.0, "pause_s": 0.2}
    second = [{"commit_s": 0.3, "waited_s": 0.0, "pause_s": 0.4}, {"commit_s": 0.2, "waited_s": 0.0}]
    assert engine(loop, {"commit": [[[first], second]]}).commit("0" * 16, "1.1.1") == (0.4, 0.3)


def test_a_vllm_that_dies_over_a_call_is_an_error(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's client never answers a call that was under way when its engine died."""
    monkeypatch.setattr("delta_weight_sync.vllm.engine._CHECK_S", 0.01)
    client = SimpleNamespace(errored=True, update_weight_version=lambda label: asyncio.sleep(3600))
    with pytest.raises(EngineError, match="vLLM died"):
        Engine(client, loop).relabel("1.1.1")
