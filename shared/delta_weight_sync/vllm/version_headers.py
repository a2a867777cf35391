"""Inside vLLM's API server: each answer that is not streamed names the versions that made its tokens.

    x-policy-versions: 41:0-31,42:31-64

Version 41 made the tokens 0 to 30 of the completion, version 42 those from 31 to 63. An answer with several
choices lists them in order, separated by ";". vLLM knows these spans (`CompletionOutput.weight_versions`) but
its OpenAI routes do not print them. `VersionHeaders` is given to vLLM's `--middleware`; the one patch notes
the spans as `AsyncLLM.generate` of vLLM 0.32 returns them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

HEADER = b"x-policy-versions"
Choices = list[CompletionOutput]

# For each prompt of the HTTP request that is being answered, its finished choices.
_prompts: ContextVar[list[Choices]] = ContextVar("prompts")


class VersionHeaders:
    """ASGI middleware: adds the header when an answer begins: after generation, unless it is a stream."""

    def __init__(self, app: Any) -> None:
        _install()
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request."""
        prompts: list[Choices] = []
        _prompts.set(prompts)

        async def send_with_header(message: Any) -> None:
            spans = _spans(prompts) if message["type"] == "http.response.start" else ""
            if spans:
                message = {**message, "headers": [*message["headers"], (HEADER, spans.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_header)


def _spans(prompts: list[Choices]) -> str:
    choices = [choice.weight_versions or () for prompt in prompts for choice in prompt]
    return ";".join(",".join(f"{s.version}:{s.start}-{s.end}" for s in spans) for spans in choices)


def _install() -> None:
    if AsyncLLM.generate is _generate:
        return
    known = "weight_versions" in inspect.signature(CompletionOutput).parameters
    if not known or not inspect.isasyncgenfunction(_plain):
        raise RuntimeError("vLLM's AsyncLLM.generate is not that of 0.32; install vLLM 0.32")
    AsyncLLM.generate = _generate


_plain = AsyncLLM.generate


@functools.wraps(_plain)
def _generate(*args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
    outputs: AsyncGenerator[RequestOutput, None] = _plain(*args, **kwargs)
    prompts = _prompts.get(None)
    if prompts is None:
        return outputs
    prompts.append([])
    return _noted(outputs, prompts[-1])


async def _noted(
    outputs: AsyncGenerator[RequestOutput, None], choices: Choices
) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished:
                choices.extend(output.outputs)
            yield output
