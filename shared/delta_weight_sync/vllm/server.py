"""The `vllm.endpoint_plugins` entry point: runs the follower and its HTTP routes in vLLM's own API server.

    VLLM_PLUGINS=delta_weight_sync DELTA_WEIGHT_SYNC_RUN=hf://buckets/me/wordle#first \\
        vllm serve MODEL --logprobs-mode processed_logprobs

    GET  /delta_weight_sync/status?after=N         the replica's state, and the commits of versions after N
    POST /delta_weight_sync/poke                   look for a new version now
    POST /delta_weight_sync/pause|resume|heal      with the header X-Delta-Weight-Sync-Key
    POST /delta_weight_sync/pin?version=N          with the header X-Delta-Weight-Sync-Key

A trainer may name the run instead of DELTA_WEIGHT_SYNC_RUN, by vLLM's own API for weight transfer, if vLLM's
options and VLLM_SERVER_DEV_MODE=1 allow that; see `transfer`.

The routes with a header exist only if DELTA_WEIGHT_SYNC_KEY is set; then a poke needs the key, too. If a
setting is wrong, vLLM ends with one sentence before it loads its engine. Later errors are in status and log.
"""

import asyncio
import contextlib
import gc
import hmac
import logging
import os
import re
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from delta_weight_sync import compat
from delta_weight_sync.errors import (
    BucketMissingError,
    BucketUnreachableError,
    ConfigError,
    ProtocolError,
    SettingsError,
)
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import POLL_S
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import PublicKeys
from delta_weight_sync.vllm import PROCESSED, hooks
from delta_weight_sync.vllm.disk import private_folder
from delta_weight_sync.vllm.engine import Engine
from delta_weight_sync.vllm.follower import Commands, Follower

PREFIX = "DELTA_WEIGHT_SYNC_"
_log = logging.getLogger("delta_weight_sync")
_KEY_HEADER = "x-delta-weight-sync-key"
NOT_HERE = "only the trainer may have it: unset it here, a replica needs only the public key"


class Settings(BaseModel):
    """Each field is read from the variable `DELTA_WEIGHT_SYNC_<FIELD>`. An unknown variable is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str  # hf://buckets/<owner>/<name>#<run>; without #<run> the only run of the bucket
    name: str = Field(default_factory=socket.gethostname)  # the replica's name on the dashboard
    key: str = Field("", repr=False)  # for the HTTP routes that control the follower; if empty, none exist
    public_key: str = ""  # refuse versions that none of these keys signed; see `signing`
    signing_key: str = Field("", repr=False)  # must be empty, because it is the trainer's secret
    poll_s: float = Field(POLL_S, gt=0)  # seconds between two polls of HEAD without notifications
    pause: bool = False  # pause vLLM for each commit, instead of committing between two steps
    strict: bool = False  # turn warnings about the release of vLLM into errors; see `compat`
    folder: str = ""  # scratch space for one or two checkpoints; empty: a temporary folder

    @field_validator("key", "public_key", "signing_key")
    @classmethod
    def _usable(cls, text: str, field: ValidationInfo) -> str:
        if field.field_name == "public_key":
            PublicKeys(text)
        elif field.field_name == "signing_key" and text:
            raise ValueError(NOT_HERE)
        elif not re.fullmatch("[!-~]*", text):
            raise ValueError("no HTTP header can hold it; use printable ASCII without spaces")
        return text


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Read the settings from `environ`. Raises `SettingsError`."""
    values = {key[len(PREFIX) :].lower(): value for key, value in environ.items() if key.startswith(PREFIX)}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        known = {"missing": "not set", "extra_forbidden": "there is no such variable"}
        found: dict[str, str] = {}
        for problem in error.errors():  # do not quote the value, which may be a secret
            said = problem["msg"].removeprefix("Value error, ").lower()
            found[f"{PREFIX}{str(problem['loc'][0]).upper()}"] = known.get(problem["type"], said)
        raise SettingsError(found) from None


def check(settings: Settings, *, folder: bool = True) -> None:
    """Raise a `DeltaWeightSyncError` if no follower can start with these settings. `folder`: whether this
    process is still to lock the folder."""
    reader = open_run(settings.run, public_key=settings.public_key or None)
    with contextlib.suppress(BucketMissingError, BucketUnreachableError):  # the follower tries again
        reader.writers()
    if settings.folder and folder:
        private_folder(settings.folder, f"{PREFIX}FOLDER", keep=False)


class Endpoint:
    """vLLM's `EndpointPlugin`. An app that embeds vLLM and runs its own follower sets `state.follower`."""

    name = "delta_weight_sync"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the version headers, and if there is a run to follow, the HTTP routes."""
        from delta_weight_sync.vllm._version_headers import version_headers  # imports vLLM

        def of_follower(name: str, otherwise: Any) -> Any:
            return getattr(getattr(app.state, "follower", None), name, otherwise)

        app.add_middleware(
            version_headers,
            serving=lambda: of_follower("serving", None),
            logprobs_mode=lambda: of_follower("logprobs_mode", ""),
            one_version=lambda: not of_follower("adapters", False),
        )
        settings = settings_from(os.environ) if f"{PREFIX}RUN" in os.environ else None
        if settings:
            app.state.delta_weight_sync = settings
        if settings or compat.is_set("VLLM_SERVER_DEV_MODE"):
            key = settings.key if settings else os.environ.get(f"{PREFIX}KEY", "")
            app.include_router(router(key), prefix="/delta_weight_sync")

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the follower.

        Raises:
            ConfigError: Several processes serve this engine, and only one would know the served version.
        """
        if hasattr(state, "follower"):
            return
        settings: Settings | None = getattr(state, "delta_weight_sync", None)
        chosen = hooks.TRANSFER.works() and _chosen(engine_client)
        if settings is None and not chosen:
            _log.warning("this vLLM follows no run: set %sRUN, or leave out VLLM_PLUGINS", PREFIX)
            return
        if engine_client.vllm_config.parallel_config._api_process_count > 1:
            raise ConfigError(
                "only one of several API servers would know the served version: start vLLM with"
                " --api-server-count 1, because --data-parallel-size starts one for each engine"
            )
        if chosen:
            _answer_trainers(engine_client, state, asyncio.get_running_loop())
        if settings:
            _start(engine_client, state, settings, asyncio.get_running_loop())
        gc.collect()
        gc.freeze()  # else each garbage collection visits all imports, for half a second


def _start(client: Any, state: Any, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
    """Start a follower of the run that the settings name, as `state.follower`."""
    if not hasattr(state, "folder"):  # a later follower uses it again, as this process keeps it locked
        state.scratch = Scratch()
        own = private_folder(settings.folder, f"{PREFIX}FOLDER") if settings.folder else None
        state.folder = own or state.scratch.path
    folder = state.folder
    reader = open_run(settings.run, public_key=settings.public_key or None)
    engine = Engine(client, loop)
    if client.vllm_config.lora_config and hooks.ADAPTERS.works():
        from delta_weight_sync.vllm.adapters import AdapterEngine  # imports vLLM

        models = state.openai_serving_models
        engine = AdapterEngine(client, loop, models, reader.keys.run, folder)
    follower = Follower(
        reader,
        engine,
        name=settings.name,
        folder=folder,
        poll_s=settings.poll_s,
    )
    follower.start()
    state.follower = follower
    if follower.logprobs_mode != PROCESSED:
        _log.warning(
            "this vLLM returns %s, which are wrong at a temperature other than 1: for training, start it"
            " with --logprobs-mode %s",
            *(follower.logprobs_mode, PROCESSED),
        )


def _chosen(client: Any) -> bool:
    from delta_weight_sync.vllm.transfer import is_chosen  # imports vLLM

    return is_chosen(client)


def _answer_trainers(client: Any, state: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Let the follower answer vLLM's calls for weight transfer. A trainer may name the run."""
    from delta_weight_sync.vllm.transfer import Updates, answer_by

    turn = Lock()
    configured: Settings | None = getattr(state, "delta_weight_sync", None)
    told = list[Settings]()  # the settings of a follower that a trainer asked for

    def follow(run: str) -> None:
        with turn:
            followed = next(iter(told), configured)
            if followed and followed.run != run:
                raise ConfigError(
                    f"this vLLM follows {followed.run}, not {run}: "
                    + (
                        "set DELTA_WEIGHT_SYNC_RUN to your run"
                        if configured
                        else "shut that transfer down first"
                    )
                )
            if followed:
                return
            settings = settings_from({**os.environ, f"{PREFIX}RUN": run})
            check(settings, folder=not hasattr(state, "folder"))
            _start(client, state, settings, loop)
            told.append(settings)

    def unfollow() -> None:
        with turn:
            if told:
                state.follower.stop()
                state.follower = None
                told.clear()

    answer_by(Updates(lambda: getattr(state, "follower", None), follow, unfollow), client)
    if not configured:
        _log.info("this vLLM follows the run that a trainer names by vLLM's API for weight transfer")


async def _follower(request: Request) -> Follower:
    follower: Follower | None = getattr(request.app.state, "follower", None)
    if follower is None:
        raise HTTPException(503, "no follower runs here: repeat the request, or let a trainer name a run")
    return follower


_Running = Annotated[Follower, Depends(_follower)]


def router(key: str) -> APIRouter:
    """The routes of the follower `app.state.follower`; without `key`, only its status and the poke."""

    def only_with_key(request: Request) -> None:
        if not hmac.compare_digest(key.encode(), request.headers.get(_KEY_HEADER, "").encode()):
            message = "send the server's DELTA_WEIGHT_SYNC_KEY in the header X-Delta-Weight-Sync-Key"
            raise HTTPException(401, message)

    routes = APIRouter()
    owner = APIRouter(dependencies=[Depends(only_with_key)])

    @routes.get("/status")
    async def status(follower: _Running, after: int = -1) -> ReplicaReport:
        """Return version, digest and state, and the commits of versions after `after`."""
        return follower.report(after)

    # Many pokes in a row cost little: after the first few, they cause only one poll per interval. But all
    # replicas of a Hub account share one request quota. So pokes need the key if the server has one.
    @routes.post("/poke", dependencies=owner.dependencies if key else [])
    async def poke(follower: _Running) -> None:
        """Look for a new version now."""
        follower.poke()

    def add(command: Callable[[Commands], None]) -> None:
        @owner.post(f"/{command.__name__}", name=command.__name__, description=command.__doc__)
        async def obey(follower: _Running) -> None:
            command(follower.commands)

    for command in (Commands.pause, Commands.resume, Commands.heal):
        add(command)

    @owner.post("/pin")
    async def pin(follower: _Running, version: str) -> None:
        """Go to a version, a number or a tag, and stay there."""
        try:
            await asyncio.to_thread(follower.commands.pin, int(version) if version.isdecimal() else version)
        except (ProtocolError, ConfigError) as error:
            raise HTTPException(404, str(error)) from None

    if key:
        routes.include_router(owner)
    return routes
