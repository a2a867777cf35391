"""The weight-transfer engine inside vLLM: stage a delta while vLLM generates, commit it between two steps.

The follower drives it through vLLM's own endpoints on loopback. vLLM answers them without a body, so each
call names a `report` file into which the engine writes what happened, as JSON:

    init    {tensors, report}           learn the routes           -> {"digest"}
    stage   {paths, report}             decode, in the background  -> {"stage_s"}
    commit  {digest, report}            write, check, or undo      -> {"digest", "commit_s"}

A commit whose digest is wrong is put back bit for bit before the error is raised.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from inference_space import cpu_backend, routes
from shared import codec
from shared.digest import to_hex
from shared.digest_torch import tensor_digest


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`tensors`: checkpoint name -> shape of every tensor of the run."""

    tensors: dict[str, list[int]]
    report: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`op` is "stage" (with `paths`, delta files in order) or "commit" (with the expected `digest`)."""

    op: str
    report: str
    paths: list[str] = field(default_factory=list)
    digest: str = ""


@dataclass(frozen=True)
class _Staged:
    """One tensor's changes on the device: flat positions int64 [n] and ULP differences int16 [n]."""

    name: str
    index: torch.Tensor
    ulps: torch.Tensor


class DeltaEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies delta files in O(changes); see the module's text for the calls."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn the routes and report the digest of the weights that vLLM loaded."""
        with _reported(init_info.report) as report:
            if self.parallel_config.world_size != 1:
                raise routes.RouteError(
                    "one replica is one device for now; start vLLM with one GPU per replica"
                )
            if self.device.type == "cpu":
                cpu_backend.self_test(self.model)
            self._routes = routes.learn(self.model, init_info.tensors)
            self._staged: list[_Staged] = []
            report["digest"] = self._live_digest()

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Nothing to finalize: a commit is complete when it returns."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, whose device synchronization raises on a CPU-only torch."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Run one op."""
        if update_info.op == "stage":
            threading.Thread(target=self._stage, args=(update_info,), name="stage", daemon=True).start()
        elif update_info.op == "commit":
            with _reported(update_info.report) as report:
                started = time.perf_counter()
                report["digest"] = self._commit(update_info.digest)
                report["commit_s"] = time.perf_counter() - started
        else:
            raise ValueError(f"unknown op {update_info.op!r}")

    def _stage(self, update_info: UpdateInfo) -> None:
        with _reported(update_info.report, swallow=True) as report:
            started = time.perf_counter()
            self._staged = [
                self._to_device(patch)
                for path in update_info.paths
                for patch in codec.decode(Path(path)).patches
            ]
            report["stage_s"] = time.perf_counter() - started

    def _to_device(self, patch: codec.Patch) -> _Staged:
        route = self._routes.get(patch.name)
        if route is None or patch.index[-1] >= route.numel():
            raise codec.CodecError(
                f"the delta changes {patch.name} {patch.shape}, which this model does not have"
            )
        index = torch.from_numpy(patch.index).to(self.device)
        return _Staged(patch.name, index, torch.from_numpy(patch.ulps.view("int16")).to(self.device))

    @torch.no_grad()
    def _commit(self, expected: str) -> str:
        undo: list[Callable[[], None]] = []
        try:
            for patch in self._staged:
                self._write(patch, undo)
            digest = self._live_digest()
            if digest != expected:
                raise codec.CodecError(f"the weights have digest {digest}, published was {expected}")
            return digest
        except BaseException:
            for put_back in reversed(undo):
                put_back()
            raise
        finally:
            self._staged = []

    def _write(self, patch: _Staged, undo: list[Callable[[], None]]) -> None:
        live = self._routes[patch.name]
        old = live[patch.index]
        undo.append(lambda: live.index_copy_(0, patch.index, old))
        live.index_copy_(0, patch.index, old + patch.ulps)

    def _live_digest(self) -> str:
        return to_hex(sum(tensor_digest(name, live) for name, live in self._routes.items()))


class _reported:  # noqa: N801 - used as a context manager only
    """Writes a report file when the block ends: what the block put in, or the error that ended it."""

    def __init__(self, path: str, *, swallow: bool = False) -> None:
        self._path, self._swallow = Path(path), swallow
        self._report: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        return self._report

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._report["error"] = f"{type(error).__name__}: {error}"
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._report))
        temporary.replace(self._path)
        return self._swallow
