"""A run whose weights drift, written version by version with the real outbox; small, for many tests."""

from pathlib import Path

import torch

from delta_weight_sync.codec import Encoding
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket

RUN = "drifting"
PATIENCE_S = 300.0  # for what takes moments; only a fault takes so long
TENSORS = {"embed.weight": (300, 40), "layers.0.weight": (40, 80), "norm.weight": (64,)}


class Drifting:
    """Publishes version 0 when it is made; `step` publishes the next one."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        tensors: dict[str, tuple[int, ...]] = TENSORS,
        drift: float = 1e-5,
        keep: Keep | None = None,
        encoding: Encoding = "fast",
    ) -> None:
        self.folder, self.url = folder, folder.as_uri()
        self._drift = drift
        self._chance = torch.Generator().manual_seed(seed)
        self.weights = {name: 0.02 * self._noise(shape) for name, shape in tensors.items()}
        bucket = open_bucket(self.url, create=True)
        assets = folder.with_name(f"{folder.name}-assets")
        assets.mkdir(exist_ok=True)
        (assets / "config.json").write_text('{"model_type": "drifting"}')
        self._log = RunLogWriter(bucket, RUN, every_s=3600)
        writer = RunWriter(bucket, RUN, model="m", assets=assets)
        self.outbox = Outbox(writer, self._log, keep=keep, encoding=encoding)
        self.newest = self._publish(0)

    def step(self) -> Manifest:
        """The next version: a few hundred weights move."""
        for weight in self.weights.values():
            weight += self._drift * self._noise(weight.shape)
        self.newest = self._publish(self.newest.version + 1)
        return self.newest

    def settle(self) -> None:
        """Wait for jumps and anchors, which the next version then names."""
        assert self.outbox.shortcuts.idle(PATIENCE_S)

    def close(self) -> None:
        """End the publisher's threads."""
        self.outbox.close()
        self._log.close()

    def _publish(self, sync: int) -> Manifest:
        self.outbox.publish(self.weights.items(), sync)
        return self.outbox.flush()

    def _noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._chance)
