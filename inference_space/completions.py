"""The inference routes: requests that vLLM can bear, passed directly to vLLM's app in this process.

vLLM trusts its callers. So this module refuses requests that would cost minutes or gigabytes, even with the
key. vLLM itself checks types, logprobs and lengths in tokens. But it lists up to 15 errors for each wrong
element, so a list of 100 KB would stop its server for seconds: the shape of the inputs is checked here.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_space.vllm_server import VllmServer
from space_guard.guard import replay

BYTES_PER_TOKEN = 16  # allowed per token of the context: a token id takes 8, an escaped character 6 to 12
OTHER_BYTES = 64 << 10  # allowed for everything else in a body
MAX_BODY = 8 << 20  # bytes that no body may exceed, even if the context is long or not known yet
# strings in `stop` (OpenAI's limit), characters in all of them
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_ENTRIES = 1024  # of each field that is a list or object, except the prompt; messages; parts of messages
MAX_VALUES = 4096  # of all messages together, however nested
MAX_ECHOED = 1024  # tokens, or bytes of text, of all prompts that are echoed with logprobs
STOP_S = 10.0  # seconds for vLLM to stop a request whose time is up
INPUTS = "prompt", "messages"
# The fields that OpenAI's clients and TRL send, and vLLM's sampling parameters that cost nothing.
_NAMES = (
    "model prompt messages stream stream_options user n max_tokens max_completion_tokens min_tokens"
    " temperature top_p top_k min_p seed stop stop_token_ids logit_bias frequency_penalty presence_penalty"
    " repetition_penalty ignore_eos include_stop_str_in_output skip_special_tokens"
    " spaces_between_special_tokens add_special_tokens echo suffix logprobs top_logprobs return_token_ids"
    " return_tokens_as_token_ids tools tool_choice parallel_tool_calls reasoning_effort chat_template_kwargs"
    " add_generation_prompt continue_final_message response_format structured_outputs"
)
FIELDS = frozenset(_NAMES.split())
_INFERENCE = {"/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}


@dataclass(frozen=True)
class Completions:
    """Checks the bodies of completion requests."""

    context: Callable[[], int | None]  # the model's context in tokens; None while it is not known
    batch: int  # completions that one request may ask for

    @property
    def limit(self) -> int:
        context = self.context()
        return MAX_BODY if context is None else min(MAX_BODY, OTHER_BYTES + BYTES_PER_TOKEN * context)

    def count(self, body: bytes) -> int:
        """How many completions `body` asks for. Raises `HTTPException` for a body that vLLM must not get."""
        if len(body) > self.limit:
            raise HTTPException(413, f"The body is too large. Send at most {self.limit} bytes.")
        try:
            return self._checked(body)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    def _checked(self, body: bytes) -> int:
        asked = None
        with suppress(ValueError, RecursionError):
            asked = json.loads(body)  # as vLLM reads it
        if not isinstance(asked, dict):
            raise ValueError("the body must be a JSON object")
        for name, value in asked.items():
            if name not in FIELDS and value is not None:
                raise ValueError(f"the field {name[:40]!r} is not accepted here: leave it out")
            if name not in INPUTS and isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
                raise ValueError(f"{name} is too long: send at most {MAX_ENTRIES} entries")
        stops = asked["stop"] if isinstance(asked.get("stop"), list) else [asked.get("stop")]
        characters = sum(len(text) for text in stops if isinstance(text, str))
        if len(stops) > MAX_STOPS or characters > MAX_STOP_CHARACTERS:
            limit = f"{MAX_STOPS} strings, of {MAX_STOP_CHARACTERS} characters together"
            raise ValueError(f"stop is too long: send at most {limit}")
        # A chat template could loop as often as a number in these arguments says.
        options = asked.get("chat_template_kwargs")
        for value in options.values() if isinstance(options, dict) else ():
            if not (isinstance(value, bool | None) or (isinstance(value, str) and len(value) <= 64)):
                raise ValueError("chat_template_kwargs may hold true, false and short words only")
        n = 1 if asked.get("n") is None else asked["n"]
        if type(n) is not int or n < 1:  # vLLM would read "64" as 64
            raise ValueError("n must be an integer of at least 1")
        _check_messages(asked.get("messages"))
        prompt = asked.get("prompt")
        _check_prompt(prompt)
        # vLLM would compute the logits of all these tokens in one piece.
        if asked.get("echo") and asked.get("logprobs") is not None and _length(prompt) > MAX_ECHOED:
            limit = f"{MAX_ECHOED} tokens or bytes of text in all"
            raise ValueError(f"prompts are too long for echo with logprobs: send at most {limit}")
        # A list of integers is the tokens of a single prompt.
        many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        completions = n * (len(prompt) if many and prompt else 1)
        if completions > self.batch:
            raise ValueError(f"too many completions (prompts times n): ask for at most {self.batch}")
        return completions


def _check_messages(messages: Any) -> None:
    """Raise `ValueError` unless these are messages in OpenAI's form, in numbers that vLLM checks quickly."""
    if messages is None:
        return
    wrong = "messages must be a list of objects, each with a role and content: a text, or parts of type text"
    if not isinstance(messages, list):
        raise ValueError(wrong)
    parts: list[Any] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(wrong)
        content = message.get("content")
        if isinstance(content, list):
            parts += content
        elif not isinstance(content, str | None):
            raise ValueError(wrong)
    # For a part with a URL, such as an image, vLLM would request the URL. So a Space takes only text.
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ValueError(wrong)
    if max(len(messages), len(parts)) > MAX_ENTRIES or _values_in(messages) > MAX_VALUES:
        limit = f"{MAX_ENTRIES} messages, {MAX_ENTRIES} parts and {MAX_VALUES} values in all"
        raise ValueError(f"messages are too many: send at most {limit}")


def _check_prompt(prompt: Any) -> None:
    """Raise `ValueError` unless this is a text, a list of texts, tokens, or a list of lists of tokens."""
    if prompt is None or isinstance(prompt, str):
        return
    if isinstance(prompt, list):
        if all(isinstance(each, str) for each in prompt) or _are_tokens(prompt):
            return
        if all(isinstance(each, list) and _are_tokens(each) for each in prompt):
            return
    raise ValueError("prompt must be a text, a list of texts, a list of tokens, or a list of lists of tokens")


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _length(prompt: Any) -> int:
    """Length of all prompts together, in tokens or bytes of text; no text has more tokens than bytes."""
    if isinstance(prompt, list) and not _are_tokens(prompt):
        return sum(map(_length, prompt))
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace"))
    return len(prompt or ())


def _values_in(value: Any) -> int:
    """How many values a JSON value holds, at any depth."""
    count = 0
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, list | dict):
            count += len(inner)
            waiting += inner.values() if isinstance(inner, dict) else inner
    return count


@dataclass
class Inference:
    """ASGI middleware: answers the inference routes with vLLM, without the cost of FastAPI's layers.

    At most `capacity` completions run at the same time, and each request takes at most `seconds`.
    """

    app: ASGIApp  # answers all other routes
    vllm: VllmServer
    unready: Callable[[], str | None]  # why no version is served; None if one is
    completions: Completions
    capacity: int
    seconds: float
    _running: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _INFERENCE.get(scope["path"]) != scope["method"]:
            return await self.app(scope, receive, send)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._admit(scope, receive, answer)
        except HTTPException as refusal:
            if not begun:  # an answer that has begun is cut off: its status cannot change any more
                await openai_error(refusal)(scope, receive, send)
        return None

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = 0
        if scope["method"] == "POST":
            body: bytes = (await receive())["body"]  # complete: the guard has read it
            receive = replay(body, receive)
            wanted = self.completions.count(body)
        if self._running + wanted > self.capacity:
            raise _later(429, "too many completions are running")
        deadline = asyncio.get_running_loop().time() + self.seconds
        late = False

        async def until_late() -> Message:
            """The client's next message. Once late, the client seems to leave: then vLLM stops generating."""
            nonlocal late
            try:
                async with asyncio.timeout_at(deadline):
                    return await receive()
            except TimeoutError:
                late = True
                return {"type": "http.disconnect"}

        async def unless_late(message: Message) -> None:
            if not late:
                await send(message)

        self._running += wanted
        try:
            async with asyncio.timeout_at(deadline + STOP_S) as clock:
                await self._pass(scope, until_late, unless_late)
        except TimeoutError:
            if not clock.expired():  # a timeout of vLLM itself
                raise
            late = True
        finally:
            self._running -= wanted
        if late:
            sentence = "the answer took longer than this Space allows: ask again, or for fewer tokens"
            raise HTTPException(504, sentence)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        vllm = self.vllm.app
        died = False

        async def unless_dead(message: Message) -> None:
            """Pass vLLM's answer on, unless vLLM answers 500 because its engine has died."""
            nonlocal died
            died = died or (message.get("status") == 500 and not self.vllm.alive())
            if not died:
                await send(message)

        if (reason := self.unready()) is not None:
            raise _later(503, f"no version is served yet: {reason}")
        if vllm is not None:
            await vllm(scope, receive, unless_dead)
        if vllm is None or died:
            raise _later(503, "vLLM is being restarted")


def openai_error(refusal: HTTPException) -> JSONResponse:
    """A refusal in the form that OpenAI's clients expect."""
    kind = "unavailable" if refusal.status_code == 503 else "refused"
    error = {"message": refusal.detail, "type": kind, "code": refusal.status_code}
    return JSONResponse({"error": error}, refusal.status_code, refusal.headers)


def _later(status: int, sentence: str) -> HTTPException:
    return HTTPException(status, f"{sentence}; try again in a moment", {"Retry-After": "1"})
