"""Headers of vLLM's API server. The first says which version made which tokens of an answer, as JSON.

    x-policy-versions: [{"weights":{"version":41,"term":1,"sync":40},"tokens":[[0,0,31]]},
                        {"weights":{"version":42,"term":1,"sync":42},"tokens":[[0,31,64]]}]

The header is one line. In choice 0, version 41 (the trainer's sync 40) made tokens 0 to 30, and version 42
made tokens 31 to 63. `weights` is the label that the follower gave to vLLM, or null for weights that were
never published. vLLM labels tokens since 0.32. Since 0.33, it returns the labels to clients of `/v1/` that
set `return_weight_versions`. Here all clients get them: a patch reads the outputs of `AsyncLLM.generate`.

An entry without `tokens` stands for the whole answer. It names the version that was served when the request
came. This is the only entry before vLLM 0.32, of a streamed answer, and if the header would be too long. For
beam search, and answers of `/v1/responses` with built-in tools, vLLM makes several requests to its engine. So
the entries name all versions that took part, without `tokens`.

The headers of a streamed answer leave before its versions are known. So its last chunk, the one before
`[DONE]`, has them in the field `policy_versions`, in the form of the header. (Clients ignore fields that they
do not know, but many cannot read an event stream with comments.) Before vLLM 0.32, two entries without
`tokens` name the versions served at the start and at the end.

Another header, `x-policy-logprobs`, names vLLM's `logprobs_mode`. At a temperature other than 1, a trainer
can use only `processed_logprobs`.

A request can demand recent weights. With `x-policy-min-sync: 38`, a server with weights of an earlier sync
answers 503, so that clients and routers try another server, or the same server later. With
`x-policy-exact-sync: 38`, all tokens come from this sync: a server with weights of a later sync answers 409,
because it will not go back. If the weights change while the server generates, it answers 503. The status of a
stream has been sent by then, so an error takes the place of the last chunk. Streams of other routes than
completions and `/inference/`, such as `/v1/responses`, have no such chunk: the server answers 501.
"""

import functools
import itertools
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from fastapi.responses import JSONResponse
from vllm import outputs as vllm_outputs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from delta_weight_sync.engine import label_of
from delta_weight_sync.records import Manifest
from delta_weight_sync.vllm import hooks

Choices = list[CompletionOutput]
MIN_SYNC = "x-policy-min-sync"
EXACT_SYNC = "x-policy-exact-sync"
# These routes answer with choices; their streams end with a chunk of choices, and then `[DONE]`.
_WITH_CHOICES = re.compile("/v1/(chat/)?completions(/.*)?|/inference/.*")
_OF_A_BEAM = re.compile(r"-beam-\d+$")  # the end of the id that vLLM's beam search gives to its requests
_LONGEST = 8000  # bytes; common clients refuse headers of more than 8190 bytes
_json = functools.partial(json.dumps, separators=(",", ":"))
_plain = AsyncLLM.generate
# Finished choices of each request to the engine, by its id, that a client's request makes.
_prompts: ContextVar[dict[str, Choices]] = ContextVar("prompts")


def version_headers(
    app: Any,
    serving: Callable[[], Manifest | None],
    logprobs_mode: Callable[[], str] = lambda: "",
    one_version: Callable[[], bool] = lambda: True,
) -> Any:
    """ASGI middleware that adds versions to answers, and refuses requests that need other weights.

    `serving` returns the version whose weights are live, or None if no version is served. `logprobs_mode`
    returns vLLM's option of this name, "" if it is not known. `one_version` returns whether all requests are
    answered by the version that is live; adapters are served side by side.
    """
    if hooks.LABELS.works():
        AsyncLLM.generate = _generate

    async def answer(scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        live = serving()
        headers = dict(scope["headers"])
        for name in (MIN_SYNC, EXACT_SYNC):
            asked = headers.get(name.encode())
            if asked and (refusal := _refusal(name, asked, live)):
                return await refusal(scope, receive, send)
        reply = _Reply(
            (scope, receive, send),
            live,
            serving,
            logprobs_mode(),
            exact=headers.get(EXACT_SYNC.encode()),
            whole=one_version(),
        )
        _prompts.set(reply.prompts)
        await app(scope, receive, reply.send)
        return None

    return answer


class _Reply:
    """Adds versions to vLLM's answer to one request."""

    def __init__(
        self,
        request: tuple[Any, Any, Any],
        live: Manifest | None,
        serving: Callable[[], Manifest | None],
        logprobs_mode: str,
        exact: bytes | None,
        whole: bool,
    ) -> None:
        """`request`: its ASGI scope, receive and send; `live`: the version served when it came; `exact`: the
        only sync that may make tokens; `whole`: whether an answer without labels comes from that version."""
        self.prompts = dict[str, Choices]()
        self._request = request
        path = request[0]["path"].removeprefix(request[0].get("root_path", ""))
        self._has_choices = bool(_WITH_CHOICES.fullmatch(path))
        self._send = request[2]
        self._live = live
        self._serving = serving
        self._logprobs_mode = logprobs_mode
        self._exact = exact
        self._whole = whole
        self._streams = False
        self._refused = False
        self._held: Any = None  # a chunk that may be the last one

    async def send(self, message: Any) -> None:
        """Pass on a message of vLLM's ASGI app."""
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._streams = content_type.startswith(b"text/event-stream")
            refusal = self._no_choices() if self._streams else self._changed()
            if message["status"] == 200 and refusal:
                # At once: when a client has its whole answer, its server lets vLLM end the stream.
                self._refused = True
                await refusal(*self._request)
            versions = "" if self._streams else self._versions()
            if not 0 < len(versions) < _LONGEST:
                versions = _whole(self._live) if self._whole else ""
            added = {b"x-policy-versions": versions, b"x-policy-logprobs": self._logprobs_mode}
            found = [(name, value.encode()) for name, value in added.items() if value]
            message = {**message, "headers": [*message["headers"], *found]}
        if self._refused:
            return
        if self._streams and "body" in message:
            held = self._held
            self._held = None
            if held and message["body"] == b"data: [DONE]\n\n":
                held = {**held, "body": self._last(held["body"])}
            if held:
                await self._send(held)
            # The last chunk of a choice says why the choice ended. A chunk of token counts has no choice.
            if b'"choices":' in message["body"] and b'"finish_reason":null' not in message["body"]:
                self._held = message
                return
        await self._send(message)

    def _last(self, chunk: bytes) -> bytes:
        """The last chunk of a stream, with the versions that made its tokens."""
        if refusal := self._changed():
            return b"data: %b\n\n" % bytes(refusal.body)
        versions = self._versions()
        if not versions and self._whole:
            versions = _whole(self._live, self._serving())
        end = chunk.rindex(b"}")
        return chunk[:end] + b',"policy_versions":%b' % (versions or "[]").encode() + chunk[end:]

    def _versions(self) -> str:
        """The versions of all finished choices; "" if none is known."""
        # A beam search makes a request for each token of a beam, and routes without choices one for each part
        # of their answer.
        parts = len(self.prompts) > 1
        if self._has_choices:
            parts = any(_OF_A_BEAM.search(name) for name in self.prompts)
        tokens = dict[str, list[tuple[int, int, int]]]()
        # A stream's choices finish in any order.
        ordered = (sorted(choices, key=lambda choice: choice.index) for choices in self.prompts.values())
        for number, choice in enumerate(itertools.chain(*ordered)):
            for span in choice.weight_versions or ():
                tokens.setdefault(span.version, []).append((number, span.start, span.end))
        entries = []
        for label, places in tokens.items():
            # The follower's labels are JSON objects. vLLM's own, such as "default", are not.
            weights = label if label.startswith("{") else "null"
            made = "" if parts else f',"tokens":{_json(places)}'
            entries.append(f'{{"weights":{weights}{made}}}')
        return f"[{','.join(entries)}]" if entries else ""

    def _no_choices(self) -> JSONResponse | None:
        """The refusal of a stream that could not say that the weights changed, although it must."""
        if self._exact is None or self._has_choices:
            return None
        return _refuse(501, f"{EXACT_SYNC} holds for no stream of this route: leave it out, or do not stream")

    def _changed(self) -> JSONResponse | None:
        """The refusal of an answer that has tokens of another sync than the request needs."""
        if self._exact is None:
            return None
        # Published weights have the follower's labels, which are JSON objects.
        spans = itertools.chain(
            *(choice.weight_versions or () for choice in itertools.chain(*self.prompts.values()))
        )
        labels = {span.version for span in spans}
        syncs = {json.loads(label)["sync"] if label.startswith("{") else None for label in labels}
        if not syncs - {int(self._exact)}:
            return None
        has = f"has sync {live.sync} now" if (live := self._serving()) else "serves no version now"
        return _refuse(
            503,
            f"this server's weights changed while it answered: it {has}, but the request needs sync"
            f" {int(self._exact)} alone: use another server, or ask for a newer sync",
        )


def _refusal(header: str, asked: bytes, live: Manifest | None) -> JSONResponse | None:
    """The answer to a request whose `header` asks for a sync; None if `live` may answer the request."""
    has = f"has sync {live.sync}" if live else "serves no version now"
    exact = header == EXACT_SYNC
    if not (asked.isdigit() and len(asked) < 19):
        return _refuse(400, f"{header} must be the number of a sync")
    needs = f"this server {has}, but the request needs sync {int(asked)}"
    if exact and not hooks.LABELS.works():
        return _refuse(501, f"{header} needs vLLM 0.32 or newer, which says which weights made each token")
    if live is None or live.sync < int(asked):
        return _refuse(503, f"{needs}: use another server, or try again later")
    if exact and live.sync > int(asked):
        return _refuse(409, f"{needs} alone: use another server, or ask for a newer sync")
    return None


def _refuse(status: int, sentence: str) -> JSONResponse:
    error = {"message": sentence, "type": "refused", "code": status}
    return JSONResponse({"error": error}, status, {"Retry-After": "1"} if status == 503 else None)


def _whole(*served: Manifest | None) -> str:
    """Versions of an answer whose tokens have no labels; "" if none was served."""
    text = ",".join(f'{{"weights":{label_of(each)}}}' for each in served if each)
    return text and f"[{text}]"


def _length(choice: CompletionOutput) -> int:
    """The number of tokens of a finished choice. A stream's last output has only its last tokens."""
    spans = choice.weight_versions
    return spans[-1].end if spans else len(choice.token_ids)


@functools.wraps(_plain)
async def _generate(
    self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    choices = Choices()
    if (prompts := _prompts.get(None)) is not None:
        prompts[request_id] = choices
    async with aclosing(_plain(self, prompt, sampling_params, request_id, *args, **kwargs)) as outputs:
        async for output in outputs:
            finished = [choice for choice in output.outputs if choice.finished()]
            # An adapter is one version for the whole request; vLLM's own labels are those of the base.
            if label := getattr(output.lora_request, "label", ""):
                for choice in finished:
                    choice.weight_versions = [vllm_outputs.WeightVersionSpan(label, 0, _length(choice))]
            choices.extend(finished)
            yield output
