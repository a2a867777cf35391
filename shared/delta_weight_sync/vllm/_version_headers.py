"""Response headers of vLLM's API server that say which version made which tokens of an answer.

    x-policy-versions: 41:0-31,42:31-64
    x-policy-syncs: 40:0-31,42:31-64
    x-policy-version: 41
    x-policy-term: 1
    x-policy-sync: 40

Version 41 made tokens 0 to 30 of the completion, version 42 made tokens 31 to 63. If there are several
choices, ";" separates their spans, in order. `x-policy-syncs` names the trainer's sync of each span, instead
of the version. This header leaves out spans of weights that were never published, because they have no sync.
The last three headers describe the oldest version that made a token. vLLM has these spans since 0.32. Since
0.33, it returns them to clients of `/v1/` that set `return_weight_versions`. Here all clients get the spans
(unless the answer is streamed): a patch reads them from the outputs of `AsyncLLM.generate`. Before 0.32,
there are no spans, so the last three headers name the version that was served when the request came.

A request can demand recent weights. With `x-policy-min-sync: 38`, a server with weights of an earlier sync
answers 503, so that clients and routers try another server, or the same server later.
"""

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from fastapi.responses import JSONResponse
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from delta_weight_sync.records import Manifest
from delta_weight_sync.vllm import hooks
from delta_weight_sync.vllm.engine import TokenVersion

Choices = list[CompletionOutput]
MIN_SYNC = "x-policy-min-sync"
_PATHS = ("/v1/", "/inference/")
_LONGEST = 1 << 12  # bytes; longer headers are left out, because common clients refuse more than 8190 bytes
_plain = AsyncLLM.generate
_prompts: ContextVar[list[Choices]] = ContextVar("prompts")  # finished choices of each prompt of a request


def version_headers(app: Any, serving: Callable[[], Manifest | None]) -> Any:
    """ASGI middleware that refuses requests which need newer weights, and adds the headers to responses.

    A streamed response begins before its versions are known, so its headers name only the version served when
    the request came. Its tokens are of this version or newer, unless the owner goes back to an older version.

    `serving` returns the version whose weights are live, or None if no version is served.
    """
    if hooks.LABELS.works():
        AsyncLLM.generate = _generate

    async def answer(scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http" or not scope["path"].startswith(_PATHS):
            return await app(scope, receive, send)
        live, prompts = serving(), list[Choices]()
        asked = dict(scope["headers"]).get(MIN_SYNC.encode())
        if asked and (refusal := _refusal(asked, live)):
            return await refusal(scope, receive, send)
        _prompts.set(prompts)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_headers(prompts, live)]}
            await send(message)

        return await app(scope, receive, send_with_headers)

    return answer


def _refusal(asked: bytes, serving: Manifest | None) -> JSONResponse | None:
    """The answer to a request that asks for sync `asked` or newer; None if the live weights are that new."""
    has = f"has sync {serving.sync}" if serving else "serves no version now"
    if not (asked.isdigit() and len(asked) < 19):
        status, sentence = 400, f"{MIN_SYNC} must be the number of a sync"
    elif serving is None or serving.sync < int(asked):
        status, needs = 503, f"the request needs sync {int(asked)}"
        sentence = f"this server {has}, but {needs}: use another server, or try again later"
    else:
        return None
    error = {"message": sentence, "type": "refused", "code": status}
    return JSONResponse({"error": error}, status, {"Retry-After": "1"} if status == 503 else None)


def _headers(prompts: list[Choices], serving: Manifest | None) -> list[tuple[bytes, bytes]]:
    choices = [choice.weight_versions or () for prompt in prompts for choice in prompt]
    known = [label for spans in choices for span in spans if (label := TokenVersion.parse(span.version))]
    oldest = min(known) if known else TokenVersion.of(serving) if serving else None
    found = {f"x-policy-{name}": str(value) for name, value in (oldest._asdict() if oldest else {}).items()}
    for name in ("version", "sync"):
        text = ";".join(",".join(filter(None, (_text(name, span) for span in spans))) for spans in choices)
        if text.strip(";") and len(text) < _LONGEST:
            found[f"x-policy-{name}s"] = text
    return [(name.encode(), value.encode()) for name, value in found.items()]


def _text(name: str, span: Any) -> str:
    label = TokenVersion.parse(span.version)
    if label is None and name == "sync":
        return ""  # these weights were never published
    return f"{getattr(label, name) if label else span.version}:{span.start}-{span.end}"


@functools.wraps(_plain)
async def _generate(*args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
    choices = Choices()
    if (prompts := _prompts.get(None)) is not None:
        prompts.append(choices)
    async with aclosing(_plain(*args, **kwargs)) as outputs:
        async for output in outputs:
            if output.finished:
                choices.extend(output.outputs)
            yield output
