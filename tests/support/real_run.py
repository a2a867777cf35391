"""Runs by the real publisher: real anchors, deltas, jumps, digests and times."""

import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import CommitEvent, DoneEvent, ReplicaEvent, Rollout, RunLogWriter, StepEvent
from delta_weight_sync.store import Bucket, open_bucket
from tests.support.held import held
from tests.support.waiting import PATIENCE_S

RUN = "drifting"
CONFIG = '{"model_type": "drifting"}'
Shapes = dict[str, tuple[int, ...]]
TENSORS: Shapes = {"embed.weight": (300, 40), "layers.0.weight": (40, 80), "norm.weight": (64,)}
KINDS = {"self_attn.q_proj": (2, 1), "self_attn.k_proj": (1, 1), "self_attn.o_proj": (1, 2)}
KINDS |= {"mlp.gate_proj": (3, 1), "mlp.down_proj": (1, 3)}


class Drifting:
    """A run whose weights drift. Publishes version 0 when it is made; `step` publishes the next one."""

    def __init__(
        self,
        bucket: Bucket | Path,
        *,
        run: str = RUN,
        model: str = "m",
        seed: int = 0,
        tensors: Shapes = TENSORS,
        drift: float = 1e-5,
        keep: Keep | None = None,
        encoding: Encoding = "fast",
        log_every_s: float = 3600,
        files: dict[str, str] | None = None,
    ) -> None:
        if isinstance(bucket, Path):
            self.folder, bucket = bucket, open_bucket(bucket.as_uri(), create=True)
        self.url = bucket.url
        self.rate = drift
        self._chance = torch.Generator().manual_seed(seed)
        self.weights = {name: 0.02 * self._noise(shape) for name, shape in tensors.items()}
        assets = Path(tempfile.mkdtemp())
        for name, text in ({"config.json": CONFIG} | (files or {})).items():
            (assets / name).write_text(text)
        self._remove_assets = weakref.finalize(self, shutil.rmtree, assets)
        self.reader = RunReader(bucket, run)
        writer = RunWriter(bucket, run, model=model, assets=assets)
        self.log = RunLogWriter(bucket, run, writer.writer, every_s=log_every_s)
        self.outbox = Outbox(writer, self.log, keep=keep, encoding=encoding)
        self.sync = -1
        self.publish()
        self.newest = self.flush()

    def step(self) -> Manifest:
        """The next version: a few hundred weights move."""
        self.move()
        self.publish()
        self.newest = self.flush()
        return self.newest

    def move(self) -> None:
        """As an optimizer does, before the weights are published."""
        for weight in self.weights.values():
            weight += self.rate * self._noise(weight.shape)

    def publish(self) -> None:
        """Hand the weights over, without waiting until they are in the bucket."""
        self.sync += 1
        self.outbox.publish(held(self.weights.items()), self.sync)

    def flush(self) -> Manifest:
        return self.outbox.flush()

    def steps(self, count: int) -> None:
        """As a trainer whose steps take longer than a jump."""
        for _ in range(count):
            self.step()
            self.settle()

    def settle(self) -> None:
        """Wait for jumps and anchors, which the next version then names."""
        assert self.outbox.shortcuts.idle(PATIENCE_S)

    def digest(self) -> str:
        """Of the trainer's weights, which is that of the newest version."""
        return to_hex(state_digest({name: to_bits(weight) for name, weight in self.weights.items()}))

    def close(self) -> None:
        self.outbox.close()
        self.log.close()
        self._remove_assets()

    def _noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._chance)


class SlowLink:
    """From now on, uploads to keys with `part` begin and do not end before the link is `up`."""

    def __init__(self, bucket: Bucket, part: str) -> None:
        self.begun = threading.Event()
        self.up = threading.Event()
        self._put = bucket.put
        self._part = part
        bucket.put = self._put_when_up
        bucket.put_all = lambda objects, _: [self._put_when_up(*each) for each in objects]

    def wait(self) -> None:
        """Until an upload has begun."""
        assert self.begun.wait(PATIENCE_S)

    def _put_when_up(self, key: str, data: bytes | Path) -> None:
        if self._part in key:
            self.begun.set()
            assert self.up.wait(PATIENCE_S)
        self._put(key, data)


class RealRun(Drifting):
    """A run that a reader takes over, with all that a trainer and a replica write into its log."""

    def __init__(self, bucket: Bucket, *, run: str = "real", layers: int = 4, width: int = 32) -> None:
        self._state: dict[str, np.ndarray] = {}
        tensors = dict(_shapes(layers, width))
        super().__init__(bucket, run=run, model="tiny-qwen", tensors=tensors, drift=6e-6, log_every_s=0.1)

    @property
    def version(self) -> int:
        return self.newest.version

    def step(self, reward: float = 0.5, rollouts: tuple[Rollout, ...] = ()) -> Manifest:
        """One optimizer step of the size that Adam makes, published and taken over."""
        metrics = {"sample/staleness_mean": 1.0, "games/solve_rate": reward / 2, "games/invalid_rate": 0.1}
        group = {"prompt": "Play Wordle." if rollouts else "", "rollouts": rollouts}
        step = {"step": self.version + 1, "reward": reward, "metrics": metrics}
        self.log.append(StepEvent(t=time.time(), **step, **group))
        return super().step()

    def end(self) -> None:
        """Training ends; the digest is computed from the trainer's weights."""
        self.log.append(DoneEvent(t=time.time(), version=self.version, digest=self.digest()))
        self.close()

    def flush(self) -> Manifest:
        manifest = super().flush()
        self._take(manifest)
        self.log.flush()
        return manifest

    def _take(self, manifest: Manifest) -> None:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if manifest.version == 0:
                self._state = self.reader.checkout(manifest, Path(folder))
            else:
                self.reader.apply(self._state, manifest.deltas[-1:], Path(folder))
        spent = time.perf_counter() - started
        digest = to_hex(state_digest(self._state))
        common = {"t": time.time(), "replica": "reader", "version": manifest.version, "digest": digest}
        lag = time.time() - manifest.created_at
        times = {"lag_s": lag, "fetch_s": spent / 2, "stage_s": spent / 4}
        times |= {"pause_ms": 250 * spent, "commit_ms": 200 * spent}
        self.log.append(CommitEvent(**common, **times, joined=manifest.version == 0))
        self.log.append(ReplicaEvent(**common, state="serving"))


def is_built(reader: RunReader, version: int, folder: Path) -> None:
    """A version can be built from the bucket, and proven by the digest that was published."""
    manifest = reader.manifest(version)
    assert to_hex(state_digest(reader.checkout(manifest, folder / f"{version}"))) == manifest.digest


Shown = Callable[[RealRun | None], None]  # the fixture of conftest.py


def _shapes(layers: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "model.embed_tokens.weight", (4 * width, width)
    for layer in range(layers):
        for kind, (rows, columns) in KINDS.items():
            yield f"model.layers.{layer}.{kind}.weight", (rows * width, columns * width)


def games() -> tuple[Rollout, ...]:
    """A group of four answers: solved, unsolved, an invalid word, and text that attacks the page."""
    crane = "c1-r2?a3+n4-e5-"
    slate = "s1-l2?a3+t4-e5-"
    plumb = "p1+l2+u3+m4+b5+"
    return (
        Rollout(turns=(("crane", crane), ("slate", slate), ("plumb", plumb), ("", "")), reward=1.5, sync=3),
        Rollout(turns=(("crane", crane), ("slate", slate)), reward=0.4, sync=3),
        Rollout(turns=(("zzzzz", "not a word"), ("crane", crane)), reward=0.2, sync=2),
        Rollout(turns=(("<img src=x onerror=alert(1)>", ""),), reward=None, sync=2),
    )
