"""Serves a run by transformers, without vLLM: its API like OpenAI's, with live weights that follow the run.

The handlers of requests are those of `transformers serve`. They get one model, which the follower changes in
place: as everywhere, a commit writes all changes or none, and the digest of the live weights proves it.

One thread generates and commits, one after the other. So one version makes a whole answer, and greedy tokens
are those of a fresh load. A commit goes before the requests that wait. A request whose client has left is
skipped, or stops before its next token. (Continuous batching in `transformers serve` has one temperature for
all requests, that of the first, and batches add up in another order.)

A tensor of the run must be a tensor of the model, under the same name and with the same dtype. Models for
which transformers renames or stacks tensors, such as mixtures of experts, are refused: vLLM serves them.
"""

import asyncio
import logging
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from math import inf
from pathlib import Path
from typing import Any, Final

from delta_weight_sync.errors import MissingExtraError, RouteError

try:
    import torch
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager, GenerationState
except ImportError as error:  # a package is missing, or its release has other modules
    raise MissingExtraError("serving without vLLM", "serve", error) from error

from delta_weight_sync.checkpoint import dtype_of, small_files, words_shape
from delta_weight_sync.engine import Dtypes, Shapes
from delta_weight_sync.local_engine import LocalEngine, Owned, Result
from delta_weight_sync.reader import open_run
from delta_weight_sync.vllm import MODEL_NAME
from delta_weight_sync.vllm.disk import private_folder
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.guard import KeyGuard
from delta_weight_sync.vllm.routes import Geometry, Piece, Route, storage_of
from delta_weight_sync.vllm.server import router, settings_from

_MOST_WAITING: Final = 32  # requests; one more would wait for minutes, and is refused
_log = logging.getLogger("delta_weight_sync")


class TransformersEngine(LocalEngine):
    """A model of transformers that takes commits between two answers.

    Attributes:
        tokenizer: The model's tokenizer; None before `start`.
        thread: Generates and commits.
    """

    what = "transformers"

    def __init__(self) -> None:
        super().__init__(label="null")
        self.tokenizer: Any = None
        self.thread = _Thread(self)
        self._model: Any = None
        self._files: dict[str, str] = {}

    def describe(self) -> str:
        """The release of transformers, and how it takes commits."""
        return f"transformers {__version__}, commits between two answers"

    def alive(self) -> bool:
        """Whether a model is loaded."""
        return self._model is not None

    def serves(self, checkpoint: Path) -> bool:
        """Whether the model was loaded with the config, tokenizer and chat template of `checkpoint`."""
        return self.alive() and small_files(checkpoint) == self._files

    def start(self, checkpoint: Path) -> None:
        """Load a checkpoint, in place of what is loaded."""
        self.stop()
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval().requires_grad_(False)
        model.register_forward_pre_hook(lambda *_: self.thread.stop_if_left())
        for parameter in model.parameters():
            parameter.data = (
                parameter.data.clone()
            )  # else it is the file's memory, until something writes to it
        # As in vLLM, sample from all tokens unless the checkpoint or the request says otherwise. The handlers
        # make temperature 0 greedy.
        model.generation_config.do_sample = True
        model.generation_config.top_k = model.generation_config.top_k or 0
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._files = small_files(checkpoint)
        self._model = model

    def stop(self) -> None:
        """Forget the model."""
        self._model = None
        self.label = "null"

    def model(self) -> Any:
        """The live model; None before `start`."""
        return self._model

    def find(self, shapes: Shapes, dtypes: Dtypes) -> tuple[dict[str, Route], Owned]:
        """Find each tensor under its own name."""
        routes = _routes(self._model, shapes, dtypes)
        return routes, dict.fromkeys(routes, (0,))

    def between_steps(self, call: Callable[[], Result]) -> Result:
        """Run `call` between two answers, before those that wait."""
        return self.thread.first(call)


def _routes(model: Any, shapes: Shapes, dtypes: Dtypes) -> dict[str, Route]:
    """Where each tensor of the run is in the model. Raises `RouteError` unless each is there with its bits,
    and nothing else is."""
    tensors = model.state_dict()
    routes = dict[str, Route]()
    found = set[int]()
    use_vllm = "install vLLM, which serves this model"
    for name, shape in shapes.items():
        dtype = dtypes.get(name, "BF16")
        tensor = tensors.get(name)
        if tensor is None:
            raise RouteError(f"{name}: transformers' model has no such tensor: {use_vllm}")
        if dtype_of(tensor) != dtype or words_shape(dtype, tuple(tensor.shape)) != tuple(shape):
            has = f"{dtype_of(tensor)} {list(tensor.shape)} in transformers' model"
            raise RouteError(f"{name} is {has}, but {dtype} with words {list(shape)} in the run: {use_vllm}")
        if tensor.element_size() == 1 or not tensor.is_contiguous():
            raise RouteError(f"{name} is {dtype} or not contiguous, and cannot be changed here: {use_vllm}")
        words = tensor.view(-1).view(torch.int16)
        whole = Geometry(0, (words.numel(),), (1,))
        routes[name] = Route(tuple(shape), (Piece(words, whole, whole),))
        found.add(storage_of(tensor))
    for name, tensor in tensors.items():
        if tensor.numel() and storage_of(tensor) not in found:
            raise RouteError(f"{name}: no weight of the run fills this tensor of the model: {use_vllm}")
    return routes


class _LeftError(Exception):
    """The client of the answer has left."""


class _Job:
    """A request for one answer.

    Attributes:
        seed: That of the answer's tokens; None for any.
        began: The label of the version that makes the answer, once its turn has come.
        tokens: How many tokens the answer has; None before it is made, and for a stream.
        left: Whether its client has left, or has the whole answer.
    """

    def __init__(self, request: Request, seed: int | None, waiting: "set[_Job]") -> None:
        """`waiting`: the requests whose turn has not come. This one is among them until its turn comes, or
        its client leaves."""
        self.seed = seed
        self._loop = asyncio.get_running_loop()
        self.began: asyncio.Future[str] = self._loop.create_future()
        self.tokens: int | None = None
        self.left = False
        self._waiting = waiting
        waiting.add(self)
        self._watch = asyncio.create_task(self._watch_client(request))

    def begin(self, label: str) -> None:
        """Its turn has come. Raises `_LeftError` if its client has left. Called by the thread."""
        self._loop.call_soon_threadsafe(self._waiting.discard, self)
        self._loop.call_soon_threadsafe(self.began.set_result, label)
        if self.left:
            raise _LeftError

    async def _watch_client(self, request: Request) -> None:
        try:
            while (await request.receive())["type"] != "http.disconnect":
                pass
        finally:
            self.left = True
            self._waiting.discard(self)


_job: ContextVar[_Job] = ContextVar("job")  # of the request that this context serves


class _Thread(GenerateManager):
    """Generates one answer after another, commits between them, and notes what made each answer.

    Attributes:
        waiting: The requests whose turn has not come, without those whose clients have left.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__()
        self.waiting = set[_Job]()
        self._engine = engine
        self._commits = deque[Callable[[], None]]()
        self._current: _Job | None = None

    def first(self, call: Callable[[], Result]) -> Result:
        """Run `call` before the answers that wait. Returns what it returns, and raises what it raises."""
        done = Future[Result]()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                done.set_exception(error)

        self._commits.append(run)
        super().submit(self._commit)
        return done.result()

    def _commit(self) -> None:
        while self._commits:
            self._commits.popleft()()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like the original; `fn` generates a whole answer, as a stream."""
        return super().submit(self._in_turn(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like the original; `fn` generates a whole answer."""
        job = _job.get()

        def generate(*args: Any, **kwargs: Any) -> Any:
            sequences = fn(*args, **kwargs)
            job.tokens = sequences.shape[1] - kwargs["input_ids"].shape[1]
            return sequences

        return super().async_submit(self._in_turn(generate), *args, **kwargs)

    def _in_turn(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What the thread does when the turn of this context's request has come."""
        job = _job.get()

        def run(*args: Any, **kwargs: Any) -> Any:
            self._commit()
            job.begin(self._engine.label)
            self._current = job
            try:
                with torch.random.fork_rng([], enabled=job.seed is not None):
                    if job.seed is not None:
                        torch.manual_seed(job.seed)
                    return fn(*args, **kwargs)
            finally:
                self._current = None

        return run

    def stop_if_left(self) -> None:
        """Raise `_LeftError` if the client of the answer that is being made has left. Called before each
        token."""
        if self._current is not None and self._current.left:
            raise _LeftError


class _OneThread(GenerationState):
    def __init__(self, thread: _Thread) -> None:
        super().__init__()
        self._thread = thread

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Thread:
        return self._thread


class _OneModel(ModelManager):
    """Gives the handlers the engine's model, whichever name a client uses for it."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__(device="cpu")
        self._engine = engine
        self.force_model = MODEL_NAME

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # the original adds a revision, which answers would show

    def load_model_and_processor(self, model_id_and_revision: str, **_: Any) -> tuple[Any, Any]:
        return self._engine.model(), self._engine.tokenizer


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value; clients send null, [] and {} for those that they leave out."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def _is_read(messages: Any) -> bool:
    """Whether the handler reads these messages as they are. It drops other fields, parts that are no text,
    and text next to tool calls, and it puts spaces between parts."""
    for message in messages if isinstance(messages, list) else [None]:
        given = _given(message) if isinstance(message, dict) else {}
        content = given.get("content", "")
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
            content = content[0].get("text") if content[0].get("type") == "text" else None
        dropped = given.keys() - {"role", "content", "tool_calls", "tool_call_id"}
        if dropped or "role" not in given or not isinstance(content, str):
            return False
        if content and "tool_calls" in given:
            return False
    return True


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


_LENGTH: Final = (lambda value: _is_whole(value, 1), "a whole number, at least 1")
# Fields that the handlers compute: for which values, and the same in words. With other values, they fail, or
# answer as if the field were not there.
_COMPUTED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "model": (lambda value: value == MODEL_NAME, f'"{MODEL_NAME}"'),
    "prompt": (lambda value: isinstance(value, str) and value != "", "one string, not empty"),
    "messages": (
        _is_read,
        "a list of objects with role and content, tool_calls or tool_call_id, where content is one text, and"
        " not next to tool_calls",
    ),
    "tools": (lambda value: isinstance(value, list), "a list"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "temperature": (lambda value: type(value) in (int, float) and 0 <= value < inf, "a number, at least 0"),
    "top_p": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a number above 0, at most 1"),
    "seed": (lambda value: _is_whole(value, -(2**63)), "a whole number of 64 bits"),
}
# Fields that the handlers ignore, or compute as something else: the only value for which this is right.
_NEUTRAL: Final = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
# Fields that change no answer.
_HARMLESS: Final = {
    *("user", "safety_identifier", "metadata", "store", "service_tier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}


def _require_computed(body: dict[str, Any], required: str, engine: TransformersEngine) -> None:
    """Raise an `HTTPException` that names a field of a request unless the answer would be right."""
    for name in dict.fromkeys([required, *body]):
        value = body.get(name)
        if name in _COMPUTED:
            computes, what = _COMPUTED[name]
            if not computes(value):
                raise HTTPException(400, f"{name} must be {what}")
        elif name not in _HARMLESS:
            neutral = _NEUTRAL.get(name)
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise HTTPException(400, f"this server cannot do {name}: leave it out, or install vLLM")
    if "tools" in body and "tools" not in engine.tokenizer.get_chat_template(tools=body["tools"]):
        raise HTTPException(400, "the model's chat template does not know tools: leave them out")


def create_app(
    follower: Follower, engine: TransformersEngine, key: str = "", *, guarded: bool = False
) -> FastAPI:
    """The app that answers clients.

    Args:
        follower: Follows the run into `engine`.
        engine: Holds the model.
        key: The key for the routes that control the follower, as for `vllm.server`.
        guarded: Whether other requests need `key`, too, except those for health and status.

    Returns:
        The app, with `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health`, and the routes of
        `vllm.server`.
    """
    app = FastAPI()
    app.state.follower = follower
    app.include_router(router(key), prefix="/delta_weight_sync")
    if guarded:
        app.add_middleware(KeyGuard, key=key)
    parts = {"model_manager": _OneModel(engine), "generation_state": _OneThread(engine.thread)}
    chat = ChatCompletionHandler(**parts)
    completion = CompletionHandler(**parts)

    async def answer(handler: Any, required: str, request: Request, body: dict[str, Any]) -> Any:
        serving = follower.serving
        if serving is None:
            raise HTTPException(503, "no version is served yet: the status says why")
        if "x-policy-exact-sync" in request.headers:
            raise HTTPException(501, "x-policy-exact-sync needs vLLM: leave it out, or install vLLM")
        oldest = request.headers.get("x-policy-min-sync", "0")
        if not (oldest.isascii() and oldest.isdecimal() and len(oldest) < 19):
            raise HTTPException(400, "x-policy-min-sync must be the number of a sync")
        if serving.sync < int(oldest):
            has = f"this server has sync {serving.sync}, but the request needs sync {oldest}"
            raise HTTPException(503, f"{has}: try again later", {"Retry-After": "1"})
        body = _given(body)
        _require_computed(body, required, engine)
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        if "messages" in body:
            body["messages"] = [_given(message) for message in body["messages"]]
        waiting = engine.thread.waiting
        if len(waiting) >= _MOST_WAITING:
            sentence = f"{len(waiting)} requests wait here already: try again later"
            raise HTTPException(429, sentence, {"Retry-After": "1"})
        job = _Job(request, body.pop("seed", None), waiting)
        _job.set(job)
        try:
            response = await handler.handle_request(body, str(uuid.uuid4()))
            label = await job.began  # a stream may still wait for its turn, and a commit goes before it
            if job.left:
                raise _LeftError
        except _LeftError:
            return Response(status_code=499)  # its client has left
        tokens = "" if job.tokens is None else f',"tokens":[[0,0,{job.tokens}]]'
        response.headers["x-policy-versions"] = f'[{{"weights":{label}{tokens}}}]'
        return response

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict[str, Any]) -> Any:
        return await answer(completion, "prompt", request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict[str, Any]) -> Any:
        return await answer(chat, "messages", request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "delta-weight-sync"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if follower.serving is None:
            raise HTTPException(503, "no version is served yet")
        return {"status": "ok"}

    return app


def serve(environ: Mapping[str, str], host: str, port: int, *, guarded: bool) -> None:
    """Follow a run and answer clients until a signal ends this.

    Args:
        environ: The settings, as for `vllm.server`; DELTA_WEIGHT_SYNC_FOLDER is required.
        host: The address to listen on.
        port: The port to listen on.
        guarded: As for `create_app`.

    Raises:
        SettingsError: The folder, or another variable, cannot be used.
        DeltaWeightSyncError: The run cannot be opened.
    """
    settings = settings_from(environ)
    engine = TransformersEngine()
    follower = Follower(
        open_run(settings.run, public_key=settings.public_key or None),
        engine,
        name=settings.name,
        folder=private_folder(settings.folder, "DELTA_WEIGHT_SYNC_FOLDER"),
        poll_s=settings.poll_s,
    )
    _log.addHandler(logging.StreamHandler(sys.stdout))
    _log.setLevel(logging.INFO)
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # it warns of each request
    follower.start()
    app = create_app(follower, engine, settings.key, guarded=guarded)
    uvicorn.run(app, host=host, port=port, log_level="warning")
