"""The gate of the public port: it passes only the routes listed here, and checks key, body and limits.

The gate stands before every app of the Space, so a route that some library adds is closed until you list it
here. The gate compares each path as the client sent it, before anything decodes it. A refusal is a sentence
that names the fix, in the form that OpenAI's clients expect.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_guard.limits import Client, Lane, client_address
from space_guard.requests import (
    CLOSE,
    FRAMING,
    SAFE_HEADERS,
    RateLimit,
    has_key,
    no_key,
    openai_error,
    read_body,
    replay,
    too_many,
)

BODY_S = 60.0  # seconds within which a request's body must arrive
ARRIVING = 64 << 20  # bytes of bodies that may be arriving at the same time
# A visitor is a client without the key. A visitor's body counts as at least this many bytes of `ARRIVING`, so
# that one visitor cannot hold many connections with tiny, slow bodies.
LEAST = 256 << 10
# The budget of a visitor's address: how much it gains per second, and how much it can save up. A request
# costs `Route.cost`: about the milliseconds of this process. `Route.lane` limits concurrent requests.
RATE = (200.0, 2000.0)


@dataclass(frozen=True)
class Route:
    """A route that the gate passes. `path` is a regular expression for the whole path, `lane` names the limit
    on concurrent requests, and `body` names the reader that checks the body."""

    path: str
    method: str = "GET"
    lane: str = "page"
    keyed: bool = False  # needs the key, unless inference is open
    body: str | None = None  # None: a request with a body is refused
    cost: float = 1.0  # see RATE


_FILE = r"(/[\w-][\w.-]*)+"  # no part of the path begins with a dot
ROUTES = (
    Route("/", cost=2.0),
    Route("/", "HEAD", cost=2.0),
    Route("/(health|ready)", lane=""),  # any number at a time: the platform and trainers need them
    Route("/status"),
    Route("/v1/models", lane="reading"),
    Route("/v1/(chat/)?completions", "POST", lane="inference", keyed=True, body="completion", cost=10.0),
    # A poke makes the replica look at the bucket. All replicas of a user share one quota of requests to the
    # Hub, and pokes use this quota. So a poke needs the key if inference does.
    Route("/delta_weight_sync/poke", "POST", keyed=True),
    Route("/dashboard/(frame|inside|bucket|delta|verify|explain|object)", lane="reading", cost=5.0),
    # Only the routes of Gradio that the page needs. The owner's buttons also call run/predict, which needs no
    # key here: the dashboard itself checks that the key or the login is the owner's.
    Route(f"/(assets|static){_FILE}"),
    Route(r"/(theme\.css|favicon\.ico)"),
    Route(r"/gradio_api/heartbeat/\w{1,40}", lane="open pages"),
    Route("/gradio_api/run/predict", "POST", body="event", cost=10.0),
    Route("/login/(huggingface|callback)", cost=400.0),  # Gradio prints each login
    Route("/logout"),
)

# Only these headers reach the apps, so keys and tokens do not. Given an `Origin`, Gradio would answer with
# CORS headers that let any site read the answer. The gate sets the host, because a client can send any host.
_PASSED_ON = frozenset(
    b"accept accept-encoding accept-language content-type cookie if-none-match user-agent"
    b" x-policy-min-sync".split()
)
_HOST = (b"host", b"replica")


@dataclass
class Gate:
    """ASGI middleware: passes the allowed requests to `app`, and refuses all others."""

    app: ASGIApp
    _: KW_ONLY
    key: str  # opens the keyed routes; if it is empty, every client counts as a client with the key
    lanes: Mapping[str, Lane]  # the limits by the names in `Route.lane`; a lane that is missing has no limit
    readers: "Mapping[str, Completions | DashboardCalls]"  # check bodies, by the names in `Route.body`
    # If true, no route needs the key. Clients with the key still have no rate limit, and only they can use
    # the reserved quarter of each lane.
    open_inference: bool = False
    rate: RateLimit = field(default_factory=lambda: RateLimit(*RATE))
    arriving: Lane = field(default_factory=lambda: Lane(ARRIVING))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        begun = False

        async def answer(message: Message) -> None:
            """Add the headers that protect browsers. A page brings its own content security policy."""
            nonlocal begun
            if not begun:
                headers = MutableHeaders(scope=message)
                headers.update({**dict(SAFE_HEADERS), "Referrer-Policy": "same-origin"})
                headers.setdefault("Content-Security-Policy", f"default-src 'none'; {FRAMING}")
            begun = True
            await send(message)

        try:
            await self._pass(scope, receive, answer)
        except HTTPException as refusal:
            if not begun:  # an answer that has begun is cut off: its status cannot change any more
                await openai_error(refusal)(scope, receive, answer)
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find_route(scope)
        client = None if has_key(self.key, scope["headers"]) else client_address(scope)
        if client is not None and route.keyed and not self.open_inference:
            raise no_key(scope["headers"], "REPLICA_KEY")
        if client is not None and self.rate.spend(client, route.cost):
            raise too_many("your address sends too many requests")
        body, units = await self._read(scope, receive, route, client)
        lane = self.lanes.get(route.lane) or Lane(sys.maxsize)
        with lane.admit(client, units):
            headers = [_HOST, *(pair for pair in scope["headers"] if pair[0] in _PASSED_ON)]
            try:
                async with asyncio.timeout(lane.seconds) as clock:
                    await self.app({**scope, "headers": headers}, replay(body, receive), send)
            except TimeoutError:
                if not clock.expired():  # a timeout of the app itself, not of the lane
                    raise
                sentence = "the answer took longer than this Space allows: ask again, or for fewer tokens"
                raise HTTPException(504, sentence) from None

    async def _read(self, scope: Scope, receive: Receive, route: Route, client: Client) -> tuple[bytes, int]:
        """The complete, checked body, and how many units of its lane the request takes."""
        headers = dict(scope["headers"])
        announced = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        if route.body is None:
            if announced != 0:
                raise HTTPException(413, "this route takes no body: send the request without one", CLOSE)
            return b"", 1
        # Only JSON, so that no page of another site can send a body through a visitor's browser: the browser
        # would first ask with OPTIONS whether it may send JSON, and the gate refuses OPTIONS.
        if not headers.get(b"content-type", b"").startswith(b"application/json"):
            sentence = "the body must be JSON: send it with Content-Type: application/json"
            raise HTTPException(415, sentence, CLOSE)
        reader = self.readers[route.body]
        size = min(reader.limit, announced or reader.limit)  # a body of unknown length counts as the longest
        with self.arriving.admit(client, size if client is None else max(size, LEAST)):
            body = await read_body(receive, reader.limit, BODY_S)
        try:
            return reader.read(body, client)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None


def find_route(scope: Scope) -> Route:
    """The route of a request. Raises `HTTPException` if no listed route matches."""
    path = scope["raw_path"].decode("latin-1")
    known = {route.method: route for route in ROUTES if re.fullmatch(route.path, path, re.ASCII)}
    if not known:
        raise HTTPException(404, "this Space has no such route; its README lists the routes")
    if scope["method"] not in known:
        raise HTTPException(405, f"this route takes {' and '.join(known)} only", {"Allow": ", ".join(known)})
    return known[scope["method"]]


# vLLM trusts its callers, so the gate stops requests that would cost minutes or gigabytes. vLLM itself checks
# types, logprobs and lengths in tokens.
BYTES_PER_TOKEN = 16  # allowed per token of the context: a token id takes 8, an escaped character 6 to 12
OTHER_BYTES = 64 << 10  # allowed for everything else in a body
MAX_BODY = 8 << 20  # bytes that no body may exceed, even if the context is long or not known yet
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 1024  # strings in `stop` (OpenAI's limit), characters in all of them
# vLLM makes a grammar from these fields. vLLM goes on compiling a grammar even if the client hangs up.
GRAMMARS = "structured_outputs", "response_format"
MAX_ENTRIES = 1024  # of each field that is a list or object, except the inputs
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


@dataclass(frozen=True)
class Completions:
    """Checks the bodies of completion requests."""

    context: Callable[[], int | None]  # the model's context in tokens; None while it is not known
    batch: int  # completions that one request may ask for
    # Whether clients with the key may send grammars and tools. False if inference is open and no key is set,
    # because then every client counts as a client with the key.
    grammars: bool = True

    @property
    def limit(self) -> int:
        context = self.context()
        return MAX_BODY if context is None else min(MAX_BODY, OTHER_BYTES + BYTES_PER_TOKEN * context)

    def read(self, body: bytes, client: Client = None) -> tuple[bytes, int]:
        """Return the unchanged body, and how many completions it asks for. Raises `ValueError` for a body
        that vLLM must not get."""
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
        tools = asked.get("tools") and asked.get("tool_choice") != "none"
        if (client is not None or not self.grammars) and (tools or any(map(asked.get, GRAMMARS))):
            fields = f"{', '.join(GRAMMARS)} and tools (unless tool_choice is 'none')"
            fix = "leave them out, or send the key that the Space's owner sets as REPLICA_KEY"
            raise ValueError(f"only clients with the key may send {fields}: {fix}")
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
        prompt = asked.get("prompt")
        # A list of integers is the tokens of a single prompt.
        many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        completions = n * (len(prompt) if many and prompt else 1)
        if completions > self.batch:
            raise ValueError(f"too many completions (prompts times n): ask for at most {self.batch}")
        return body, completions


MAX_TEXT = 1024  # characters of an event's value


class _Call(BaseModel, strict=True):
    fn_index: int
    data: list[Annotated[str, Field(max_length=MAX_TEXT)] | None]
    session_hash: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    trigger_id: int | None = None


@dataclass(frozen=True)
class DashboardCalls:
    """Checks calls of the dashboard's events, so that only texts reach Gradio.

    In place of any value, Gradio also accepts an object that describes a file. Gradio then fetches this file
    with this machine's access.
    """

    events: Mapping[int, int]  # the number of each event -> how many inputs it has
    limit: int = 16 << 10

    def read(self, body: bytes, client: Client = None) -> tuple[bytes, int]:
        """The call with its known fields only. Raises `ValueError` if it is not a call of an event."""
        with suppress(ValidationError):
            call = _Call.model_validate_json(body)
            if self.events.get(call.fn_index) == len(call.data):
                return call.model_dump_json().encode(), 1
        problem = "the request is not one of the dashboard's events, or its page is out of date"
        raise ValueError(f"{problem}: reload the page")
