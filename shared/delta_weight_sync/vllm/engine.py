"""The weight-transfer engine inside vLLM: stage a delta while vLLM generates, commit it between two steps.

The follower drives it through vLLM's own endpoints on loopback. vLLM answers them without a body, so each
call names a `report` file into which the first worker writes what happened, as JSON:

    init    {tensors, report}           learn the routes                    -> {"digest"}
    stage   {paths, report}             decode and check, in the background -> {"stage_s"}
    commit  {digest, version, report}   write and check, or undo            -> {"digest", "commit_s"}

A commit whose digest would be wrong writes nothing; one that fails is put back bit for bit.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.digest import to_hex
from delta_weight_sync.vllm import cpu_backend, scatter, staging
from delta_weight_sync.vllm import weight_map as routes
from delta_weight_sync.vllm.loader_trace import RouteError
from delta_weight_sync.vllm.ranks import Ranks
from delta_weight_sync.vllm.reloaded import Fallback
from delta_weight_sync.vllm.staging import LiveWeights, Staged


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`tensors`: checkpoint name -> shape of every tensor of the run."""

    tensors: dict[str, list[int]]
    report: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`op` is "stage" (`paths`: delta files in order) or "commit" (`digest` they must lead to, `version`)."""

    op: str
    report: str
    paths: list[str] = field(default_factory=list)
    digest: str = ""
    version: int = 0


class DeltaEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies delta files in O(changes); see the module's text for the calls."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn the routes and report the digest of the weights that vLLM loaded."""
        self._ranks = Ranks(self.parallel_config.world_size)
        with self._reported(init_info.report) as report:
            if self.parallel_config.data_parallel_size != 1:
                raise RouteError("data-parallel vLLM is not supported; start one replica per copy")
            if self.device.type == "cpu":
                cpu_backend.self_test(self.model)
            scatter.warm_up(self.device)
            self._weights = self._learn(init_info.tensors)
            self._staged, self._digest = Staged(), self._weights.digest()
            report["digest"] = to_hex(self._digest)

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
            with self._reported(update_info.report) as report:
                started = time.perf_counter()
                self._commit(update_info.digest)
                report.update(digest=update_info.digest, commit_s=time.perf_counter() - started)
        else:
            raise ValueError(f"unknown op {update_info.op!r}")

    def _learn(self, tensors: dict[str, list[int]]) -> LiveWeights:
        learned = routes.learn(self.model, tensors)
        owned, unroutable = routes.ownership(tensors, self._ranks.gather(learned.sources()))
        for name, reason in unroutable.items():
            print(f"{name} has no route, so each commit loads it anew, which is slow: {reason}", flush=True)
        loaded = checkpoint.read_bits(Path(self.model_config.model)) if unroutable else ()
        fallback = Fallback(self.model, {name: bits for name, bits in loaded if name in unroutable})
        return LiveWeights(learned.routes, owned[self._ranks.rank], fallback, self._ranks)

    def _stage(self, update_info: UpdateInfo) -> None:
        with self._reported(update_info.report, swallow=True) as report:
            started, self._staged = time.perf_counter(), Staged()
            paths = [Path(path) for path in update_info.paths]
            self._staged = self._weights.stage(paths, self._digest)
            report["stage_s"] = time.perf_counter() - started

    @torch.no_grad()
    def _commit(self, expected: str) -> None:
        staged, self._staged = self._staged, Staged()
        if to_hex(staged.digest) != expected:
            raise codec.CodecError(
                f"the delta leads to digest {to_hex(staged.digest)}, published was {expected}"
            )
        staging.commit(staged.steps, self._ranks.agree)
        self._digest = staged.digest

    def _reported(self, path: str, *, swallow: bool = False) -> _Report:
        return _Report(Path(path) if self._ranks.rank == 0 else None, swallow)


class _Report:
    """Writes a report file when the block ends: what the block put in, or the error that ended it."""

    def __init__(self, path: Path | None, swallow: bool) -> None:
        """`path`: None for a worker that leaves the report to the first one."""
        self._path, self._swallow = path, swallow
        self._content: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        return self._content

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._content["error"] = f"{type(error).__name__}: {error}"
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._content))
            temporary.replace(self._path)
        return self._swallow
