"""A run by the real publisher, taken over by a reader: real anchors, deltas, digests and times."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import CommitEvent, DoneEvent, ReplicaEvent, Rollout, RunLogWriter, StepEvent
from delta_weight_sync.store import Bucket

KINDS = {
    "self_attn.q_proj": (2, 1),
    "self_attn.k_proj": (1, 1),
    "self_attn.o_proj": (1, 2),
    "mlp.gate_proj": (3, 1),
    "mlp.down_proj": (1, 3),
}


class RealRun:
    """Call `step` for each optimizer step; it publishes, and the replica takes the version over."""

    def __init__(
        self, bucket: Bucket, *, run: str = "real", layers: int = 4, width: int = 32, rate: float = 1e-5
    ) -> None:
        torch.manual_seed(0)
        self.rate, self.version, self._state = rate, -1, {}
        self.weights = {name: 0.02 * torch.randn(shape) for name, shape in _shapes(layers, width)}
        self._assets = tempfile.TemporaryDirectory()
        (Path(self._assets.name) / "config.json").write_text("{}")
        self.log = RunLogWriter(bucket, run, every_s=0.1)
        self.reader = RunReader(bucket, run)
        writer = RunWriter(bucket, run, model="tiny-qwen", assets=Path(self._assets.name))
        self._outbox = Outbox(writer, self.log)
        self.publish()

    def step(self, reward: float = 0.5, rollouts: tuple[Rollout, ...] = ()) -> Manifest:
        """One optimizer step of the size that Adam makes, published and taken over."""
        for weight in self.weights.values():
            weight += self.rate * torch.empty_like(weight).uniform_(-1, 1)
        metrics = {"sample/staleness_mean": 1.0, "games/solve_rate": reward / 2, "games/invalid_rate": 0.1}
        group = {"prompt": "Play Wordle." if rollouts else "", "rollouts": rollouts}
        step = self.version + 1
        self.log.append(StepEvent(t=time.time(), step=step, reward=reward, metrics=metrics, **group))
        return self.publish()

    def publish(self) -> Manifest:
        self._outbox.publish(self.weights.items(), self.version + 1)
        manifest = self._outbox.flush()
        self.version = manifest.version
        self._take(manifest)
        self.log.flush()
        return manifest

    def end(self) -> None:
        """Training ends; the digest is computed from the trainer's weights."""
        bits = {
            name: weight.to(torch.bfloat16).view(torch.uint16).numpy()
            for name, weight in self.weights.items()
        }
        digest = to_hex(state_digest(bits))
        self.log.append(DoneEvent(t=time.time(), version=self.version, digest=digest))
        self.close()

    def close(self) -> None:
        self._outbox.close()
        self.log.close()
        self._assets.cleanup()

    def _take(self, manifest: Manifest) -> None:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if manifest.version == 0:
                self._state = self.reader.checkout(manifest, Path(folder))
            else:
                self.reader.apply(self._state, manifest.deltas[-1], Path(folder))
        spent, digest = time.perf_counter() - started, to_hex(state_digest(self._state))
        common = {"t": time.time(), "replica": "reader", "version": manifest.version, "digest": digest}
        lag = time.time() - manifest.created_at
        times = {"lag_s": lag, "fetch_s": spent / 2, "stage_s": spent / 4}
        times |= {"pause_ms": 250 * spent, "commit_ms": 200 * spent}
        self.log.append(CommitEvent(**common, **times, joined=manifest.version == 0))
        self.log.append(ReplicaEvent(**common, state="serving"))


Shown = Callable[[RealRun | None], None]  # the fixture of conftest.py


def _shapes(layers: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "model.embed_tokens.weight", (4 * width, width)
    for layer in range(layers):
        for kind, (rows, columns) in KINDS.items():
            yield f"model.layers.{layer}.{kind}.weight", (rows * width, columns * width)


def games() -> tuple[Rollout, ...]:
    """A group of four answers: solved, unsolved, an invalid word, and text that attacks the page."""
    crane, slate, plumb = "c1-r2?a3+n4-e5-", "s1-l2?a3+t4-e5-", "p1+l2+u3+m4+b5+"
    return (
        Rollout(turns=(("crane", crane), ("slate", slate), ("plumb", plumb), ("", "")), reward=1.5, sync=3),
        Rollout(turns=(("crane", crane), ("slate", slate)), reward=0.4, sync=3),
        Rollout(turns=(("zzzzz", "not a word"), ("crane", crane)), reward=0.2, sync=2),
        Rollout(turns=(("<img src=x onerror=alert(1)>", ""),), reward=None, sync=2),
    )
