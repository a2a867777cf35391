"""The `vllm.endpoint_plugins` entry point: the follower and its routes inside vLLM's own API server.

    VLLM_PLUGINS=delta_weight_sync DELTA_WEIGHT_SYNC_RUN=hf://buckets/me/wordle#first vllm serve MODEL

    GET  /delta_weight_sync/status?after=N         what the replica does, its commits of versions newer than N
    POST /delta_weight_sync/poke                   look at the bucket now, as somebody knows of a version
    POST /delta_weight_sync/pause|resume|heal      with the header X-Delta-Weight-Sync-Key
    POST /delta_weight_sync/pin?version=N          with the header X-Delta-Weight-Sync-Key

The last four exist only where DELTA_WEIGHT_SYNC_KEY is set; then a poke wants it, too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request

from delta_weight_sync.history import open_run
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.vllm.engine import Engine
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.orders import Orders
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.vllm.scratch import scratch_folder
from delta_weight_sync.vllm.settings import PREFIX, Settings, settings_from
from delta_weight_sync.vllm.version_headers import VersionHeaders

KEY_HEADER = "x-delta-weight-sync-key"
log = logging.getLogger("delta_weight_sync")


class Endpoint:
    """vLLM's `EndpointPlugin`. `state.follower` is set by whoever embeds vLLM and follows by itself."""

    name = "delta_weight_sync"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the version headers, and the routes if there is something to follow."""
        app.add_middleware(VersionHeaders, serving=lambda: _serving(app.state))
        if f"{PREFIX}RUN" in os.environ:
            settings = settings_from(Settings, PREFIX, os.environ)
            app.state.delta_weight_sync = settings
            app.include_router(_router(settings.key), prefix="/delta_weight_sync")

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Begin to follow: in one process of those that serve one engine."""
        settings: Settings | None = getattr(state, "delta_weight_sync", None)
        embedded = hasattr(state, "follower")
        if settings is None or embedded or engine_client.vllm_config.parallel_config._api_process_rank > 0:
            return
        reader = open_run(settings.run, public_key=settings.public_key)
        state.follower = Follower(
            CountingReader(reader.bucket, reader.keys.run, reader.believed),
            Engine(engine_client, asyncio.get_running_loop()),
            name=settings.name,
            folder=Path(settings.folder) if settings.folder else scratch_folder(),
            poll_s=settings.poll_s,
        )
        state.follower.start()


def _serving(state: Any) -> Manifest | None:
    follower: Follower | None = getattr(state, "follower", None)
    return follower.serving if follower else None


def _router(key: str) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    async def status(request: Request, after: int = -1) -> ReplicaReport:
        """Version, digest and state, and the commits of versions newer than `after`."""
        return _follower(request).report(after)

    # However many pokes there are, they at most double what this replica asks of the store. Where there is a
    # key they want it all the same: all replicas of a user share one quota of requests.
    @router.post("/poke", dependencies=[Depends(_only_with(key))] if key else [])
    async def poke(request: Request) -> None:
        """Look at the bucket now."""
        _follower(request).poke()

    if key:
        router.include_router(_controls(), dependencies=[Depends(_only_with(key))])
    return router


def _controls() -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(request: Request) -> None:
        """Stay at the version that is served."""
        _orders(request).pause()

    @router.post("/resume")
    async def resume(request: Request) -> None:
        """Follow the newest version again."""
        _orders(request).resume()

    @router.post("/heal")
    async def heal(request: Request) -> None:
        """Compare all live weights with the published ones, and write what differs."""
        _orders(request).heal()

    @router.post("/pin")
    async def pin(request: Request, version: int) -> None:
        """Go to a version and stay there."""
        try:
            await asyncio.to_thread(_orders(request).pin, version)
        except ProtocolError as error:
            raise HTTPException(404, str(error)) from None

    return router


def _follower(request: Request) -> Follower:
    follower: Follower | None = getattr(request.app.state, "follower", None)
    if follower is None:
        raise HTTPException(503, "another process of this server follows the run; ask again")
    return follower


def _orders(request: Request) -> Orders:
    return _follower(request).orders


def _only_with(key: str) -> Any:
    def check(request: Request) -> None:
        if not hmac.compare_digest(key.encode(), request.headers.get(KEY_HEADER, "").encode()):
            raise HTTPException(
                401, "send the server's DELTA_WEIGHT_SYNC_KEY in the header X-Delta-Weight-Sync-Key"
            )

    return check
