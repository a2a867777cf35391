"""Headers of vLLM's API server. The first says which version made which tokens of an answer, as JSON.

    x-policy-versions: [{"weights":{"version":41,"term":1,"sync":40},"tokens":[[0,0,31]]},
                        {"weights":{"version":42,"term":1,"sync":42},"tokens":[[0,31,64]]}]

The header is one line. In choice 0, version 41 (the trainer's sync 40) made tokens 0 to 30, and version 42
made tokens 31 to 63. `weights` is the label that the follower gave to vLLM, or null for weights that were
never published. vLLM labels tokens since 0.32. Since 0.33, it returns the labels to clients of `/v1/` that
set `return_weight_versions`. Here all clients get them: a patch reads the outputs of `AsyncLLM.generate`.

An entry without `tokens` stands for the whole answer. It names the version that was served when the request
came. This is the only entry before vLLM 0.32, of a streamed answer, and if the header would be too long.

A second header, `x-policy-logprobs`, names vLLM's `logprobs_mode`. At a temperature other than 1, a trainer
can use only `processed_logprobs`.

A request can demand recent weights. With `x-policy-min-sync: 38`, a server with weights of an earlier sync
answers 503, so that clients and routers try another server, or the same server later.
"""

import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from fastapi.responses import JSONResponse
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from delta_weight_sync.records import Manifest
from delta_weight_sync.vllm import hooks
from delta_weight_sync.vllm.engine import label_of

Choices = list[CompletionOutput]
MIN_SYNC = "x-policy-min-sync"
_PATHS = ("/v1/", "/inference/")
_LONGEST = 8000  # bytes; common clients refuse headers of more than 8190 bytes
_json = functools.partial(json.dumps, separators=(",", ":"))
_plain = AsyncLLM.generate
_prompts: ContextVar[list[Choices]] = ContextVar("prompts")  # finished choices of each prompt of a request


def version_headers(
    app: Any, serving: Callable[[], Manifest | None], logprobs_mode: Callable[[], str] = lambda: ""
) -> Any:
    """ASGI middleware that refuses requests which need newer weights, and adds the header to responses.

    A streamed response begins before its versions are known, so its header names only the version served when
    the request came. Its tokens are of this version or newer, unless the owner goes back to an older version.

    `serving` returns the version whose weights are live, or None if no version is served. `logprobs_mode`
    returns vLLM's option of this name, "" if it is not known.
    """
    if hooks.LABELS.works():
        AsyncLLM.generate = _generate

    async def answer(scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http" or not scope["path"].startswith(_PATHS):
            return await app(scope, receive, send)
        live = serving()
        prompts = list[Choices]()
        asked = dict(scope["headers"]).get(MIN_SYNC.encode())
        if asked and (refusal := _refusal(asked, live)):
            return await refusal(scope, receive, send)
        _prompts.set(prompts)

        async def send_with_header(message: Any) -> None:
            if message["type"] == "http.response.start":
                versions = _versions(prompts, live)
                added = {b"x-policy-versions": versions, b"x-policy-logprobs": logprobs_mode()}
                found = [(name, value.encode()) for name, value in added.items() if value]
                message = {**message, "headers": [*message["headers"], *found]}
            await send(message)

        return await app(scope, receive, send_with_header)

    return answer


def _refusal(asked: bytes, serving: Manifest | None) -> JSONResponse | None:
    """The answer to a request that asks for sync `asked` or newer; None if the live weights are that new."""
    has = f"has sync {serving.sync}" if serving else "serves no version now"
    if not (asked.isdigit() and len(asked) < 19):
        status = 400
        sentence = f"{MIN_SYNC} must be the number of a sync"
    elif serving is None or serving.sync < int(asked):
        status = 503
        needs = f"the request needs sync {int(asked)}"
        sentence = f"this server {has}, but {needs}: use another server, or try again later"
    else:
        return None
    error = {"message": sentence, "type": "refused", "code": status}
    return JSONResponse({"error": error}, status, {"Retry-After": "1"} if status == 503 else None)


def _versions(prompts: list[Choices], serving: Manifest | None) -> str:
    """The header's value; "" if no version is known."""
    tokens = dict[str, list[tuple[int, int, int]]]()
    for number, choice in enumerate(choice for prompt in prompts for choice in prompt):
        for span in choice.weight_versions or ():
            tokens.setdefault(span.version, []).append((number, span.start, span.end))
    # The follower's labels are JSON objects. vLLM's own, such as "default", are not.
    weights = ((known if known.startswith("{") else "null", places) for known, places in tokens.items())
    text = ",".join(f'{{"weights":{known},"tokens":{_json(places)}}}' for known, places in weights)
    if text and len(text) < _LONGEST:
        return f"[{text}]"
    return f'[{{"weights":{label_of(serving)}}}]' if serving else ""


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
