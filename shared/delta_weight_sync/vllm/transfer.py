"""The backend `delta_weight_sync` of vLLM's own weight transfer API, on the server's side.

    VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=delta_weight_sync \\
        vllm serve MODEL --weight-transfer-config '{"backend": "delta_weight_sync"}'

A trainer names a run by `init_weight_transfer_engine`, and this server follows that run. `update_weights`
names a version, and returns when this version, or a newer one, is live. `delta_weight_sync.weight_transfer`
is the trainer's side.

vLLM calls a backend in its workers, and takes no steps during such a call. So a backend that waits there for
a download would stop generation. Here the follower downloads in the server's process, and commits between
two steps. `answer_by` therefore gives the server's `EngineClient` methods that ask the follower. The backend
in the workers, `DeltaWeightTransferEngine`, is only reached where no such server runs, and says so.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from delta_weight_sync.errors import ConfigError, DeltaWeightSyncError
from delta_weight_sync.records import Manifest
from delta_weight_sync.vllm import BACKEND, is_named
from delta_weight_sync.vllm.follower import Follower

_POLL_S = 0.01  # between two looks at the version that the follower serves
_METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "shutdown_weight_transfer_engine",
)


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):
    """What a trainer says first: the URL of its run."""

    run: str


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):
    """What a trainer says for each update; see `Wanted`."""

    version: int
    digest: str
    timeout_s: float = 0.0


class DeltaWeightTransferEngine(WeightTransferEngine):
    """The backend in a worker of vLLM: it refuses every call, because a follower brings the weights."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        """Raises `ConfigError` if vLLM was started without the plugin."""
        super().__init__(*arguments)
        if not is_named():
            raise ConfigError(f"the weight transfer backend {BACKEND!r} needs VLLM_PLUGINS={BACKEND}")

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:
        """Refuse: no server of this process follows a run."""
        self._refuse()

    def start_weight_update(self) -> None:
        """Refuse, as above."""
        self._refuse()

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Refuse, as above."""
        self._refuse()

    def finish_weight_update(self) -> None:
        """Refuse, as above."""
        self._refuse()

    def shutdown(self) -> None:
        """Do nothing, because nothing is held here."""

    def _refuse(self) -> None:
        raise ConfigError(
            f"the weight transfer backend {BACKEND!r} works in vLLM's API server only: start `vllm serve`,"
            " and reach it by HTTPVLLMWeightSyncClient"
        )


class Wanted(BaseModel):
    """The body of an update: the version that the trainer has published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0)
    digest: str
    timeout_s: float = Field(240.0, gt=0)  # vLLM's own HTTP client waits for 300 s


class Updates:
    """Answers vLLM's calls for weight transfer by a follower. Its methods are those of `EngineClient`."""

    def __init__(
        self,
        followed: Callable[[], Follower | None],
        follow: Callable[[str], None],
        unfollow: Callable[[], None],
    ) -> None:
        """`followed`: the running follower. `follow`: starts one for a URL, or checks that the running one
        follows it; raises `DeltaWeightSyncError`. `unfollow`: stops a follower that `follow` started."""
        self._followed = followed
        self._follow = follow
        self._unfollow = unfollow

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Follow the run that the trainer names."""
        told = request.init_info
        if not (isinstance(told.get("run"), str) and told.keys() == {"run"}):
            raise HTTPException(400, 'init_info must be {"run": the URL of the run}')
        try:
            await asyncio.to_thread(self._follow, told["run"])
        except DeltaWeightSyncError as error:
            raise HTTPException(400, f"{error}") from None

    async def start_weight_update(self) -> None:
        """Do nothing: the follower prepares a version while vLLM generates."""

    async def start_draft_weight_update(self) -> None:
        """Refuse, because runs hold no draft models."""
        raise HTTPException(400, f"the backend {BACKEND!r} does not update draft models")

    async def update_weights(self, request: Any) -> None:
        """Return when the wanted version, or a newer one, is live. Raises `HTTPException` if it cannot be."""
        try:
            wanted = Wanted.model_validate(request.update_info)
        except ValidationError as error:
            problem = error.errors()[0]
            raise HTTPException(400, f"update_info: {problem['loc']}: {problem['msg']}") from None
        follower = self._followed()
        if follower is None:
            raise HTTPException(409, "this vLLM follows no run yet: call init_weight_transfer_engine first")
        deadline = time.monotonic() + wanted.timeout_s
        follower.poke()
        while not _is_live(wanted, follower.serving):
            status = follower.report(wanted.version).status
            if held := follower.commands.describe():
                raise HTTPException(409, f"version {wanted.version} is not live: {held}")
            if status.state == "refused" and status.error:
                raise HTTPException(409, f"version {wanted.version} is not live: {status.error}")
            if time.monotonic() > deadline:
                why = status.error or status.state
                raise HTTPException(
                    504, f"version {wanted.version} is not live after {wanted.timeout_s} s: {why}"
                )
            await asyncio.sleep(_POLL_S)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Keep the label that the commit gave to later tokens."""
        if weight_version is not None:
            raise HTTPException(400, f"the backend {BACKEND!r} labels tokens itself: send no weight_version")

    async def shutdown_weight_transfer_engine(self) -> None:
        """Follow no longer, unless the server's settings name the run. The weights stay."""
        await asyncio.to_thread(self._unfollow)


def is_chosen(client: Any) -> bool:
    """Whether `--weight-transfer-config` of this `EngineClient` names this backend."""
    config = getattr(client.vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == BACKEND


def answer_by(updates: Updates, client: Any) -> None:
    """Let `updates` answer this client's calls for weight transfer."""
    for name in _METHODS:
        setattr(client, name, getattr(updates, name))


def _is_live(wanted: Wanted, serving: Manifest | None) -> bool:
    if serving is None or serving.version < wanted.version:
        return False
    return serving.version > wanted.version or serving.digest == wanted.digest
