"""A trainer without the training: it moves weights at random and publishes them by the real `Publisher`."""

import threading
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from delta_weight_sync import Publisher
from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from tests.chaos.faulty import Mortal

SHAPES = {"embed.weight": (192, 32), "layer.weight": (64, 64), "norm.weight": (64,)}
RETRY_S = 0.02
FLUSH_S = 40.0


class Published(NamedTuple):
    """What the trainer knows to be in the bucket."""

    version: int
    digest: str


class Trainer(Mortal):
    """Its weights are kept in a file of its own, as a trainer's checkpoint is."""

    def __init__(
        self, url: str, folder: Path, truth: Path, seed: int, ranks: tuple[int, int, str], base: Path | None
    ) -> None:
        """`ranks`: this one, how many there are, and the file by which they meet."""
        super().__init__()
        self._url = url
        self._folder = folder
        self._truth = Truth(truth)
        self._rank, self._size, store = ranks
        self._generator = torch.Generator().manual_seed(seed)
        self._sync = 0
        self._publisher: Publisher | None = None
        self._move_by = 1e-3 if base else 0.1
        self._base = base or folder / "base"
        if base is None:
            self._base.mkdir(parents=True, exist_ok=True)
            (self._base / "config.json").write_text("{}")
        mock.patch("delta_weight_sync.publish.outbox._RETRY_S", RETRY_S).start()
        mock.patch("delta_weight_sync.publish.publisher.open_bucket", self.open_bucket).start()
        self._weights = self._load()
        torch.set_num_threads(1)
        if self._size > 1:
            meeting = dist.FileStore(store, self._size)
            dist.init_process_group("gloo", store=meeting, rank=self._rank, world_size=self._size)

    def open(self) -> None:
        self._publisher = Publisher(self._url, self._base, state_minutes=0)

    def step(self, large: bool = False, full: bool = False) -> Published:
        """One optimizer step, on a disk that may be `full`; returns when it is published.

        A `large` one changes so much that an anchor is due.
        """
        self._move(large)
        self._sync += 1
        if self._rank == 0:
            bits = {name: to_bits(tensor) for name, tensor in self._weights.items()}
            self._truth.tell(self._publisher._writer.writer.id, self._sync, to_hex(state_digest(bits)))
        timer = threading.Timer(0.1, self.fill_disk, [False])
        if full:
            self.fill_disk(True)
            timer.start()
        try:
            self._publisher.publish(self._handed_over(), self._sync)
            newest = self._publisher.flush(FLUSH_S)
        finally:
            if full:
                timer.join()
        return Published(newest.version, newest.digest)

    def close(self) -> None:
        if self._publisher:
            self._publisher.close()
        if self._size > 1:
            dist.destroy_process_group()

    def _handed_over(self) -> list[tuple[str, torch.Tensor]]:
        if self._size == 1:
            return list(self._weights.items())
        mesh = init_device_mesh("cpu", (self._size,))
        return [(name, distribute_tensor(t, mesh, [Shard(0)])) for name, t in self._weights.items()]

    def _move(self, large: bool) -> None:
        share = 1.0 if large else 0.02
        for weight in self._weights.values():
            chosen = torch.rand(weight.shape, generator=self._generator) < share
            weight += chosen * self._move_by * torch.randn(weight.shape, generator=self._generator)
        if self._rank == 0:
            new = self._folder / "weights.new.npz"
            np.savez(new, **{name: tensor.numpy() for name, tensor in self._weights.items()})
            new.replace(self._folder / "weights.npz")

    def _load(self) -> dict[str, torch.Tensor]:
        path = self._folder / "weights.npz"
        if path.exists():
            with np.load(path) as file:
                return {name: torch.from_numpy(file[name].copy()) for name in file.files}
        if list(self._base.glob("*.safetensors")):
            self._folder.mkdir(exist_ok=True)
            bits = dict(read_bits(self._base))
            return {name: torch.from_numpy(b).view(torch.bfloat16).float() for name, b in bits.items()}
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Truth:
    """What trainers handed over, in a local file that no fault touches.

    Lines of writer, sync and digest, each written before the weights are handed to the publisher.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def tell(self, writer: str, sync: int, digest: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{writer} {sync} {digest}\n")

    def digest(self, writer: str, sync: int) -> str | None:
        return self._known().get((writer, f"{sync}"))

    def holds(self, digest: str) -> bool:
        return digest in self._known().values()

    def _known(self) -> dict[tuple[str, str], str]:
        lines = self._path.read_text().split("\n")[:-1]  # another process may be writing the last one
        return {(writer, sync): digest for writer, sync, digest in map(str.split, lines)}
