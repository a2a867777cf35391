"""A trainer without the training: it moves weights at random and publishes them by the real `Publisher`."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from delta_weight_sync import Publisher
from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.store import open_bucket
from tests.chaos.faulty import Fault, Faulty, die
from tests.chaos.truth import Truth

SHAPES = {"embed.weight": (192, 32), "layer.weight": (64, 64), "norm.weight": (64,)}
RETRY_S = 0.02
FLUSH_S = 40.0
SMALL_FILE = 600  # bytes that a file may have while the disk is full
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "shutil.copyfile", "shutil.rmtree"}


class Published(NamedTuple):
    """What the trainer was told is in the bucket."""

    version: int
    digest: str
    writer: str
    term: int


class Mortal:
    _hooked = False

    def __init__(self) -> None:
        self.bucket: Faulty | None = None
        self._later: Fault | None = None
        self._left, self._offset, self._folders = 0, 0.0, ("",)
        self._real_time = time.time

    def open_bucket(self, url: str, **how: Any) -> Faulty:
        """In place of the library's own: one bucket for all, which faults are armed on."""
        self.bucket = self.bucket or Faulty(open_bucket(url, **how))
        self.bucket.arm(self._later)
        return self.bucket

    def arm_later(self, fault: Fault) -> None:
        self._later = fault

    def arm(self, fault: Fault | None) -> None:
        if self.bucket:
            self.bucket.arm(fault)

    def struck(self) -> int:
        return self.bucket.struck if self.bucket else 0

    def jump(self, seconds: float) -> None:
        self._offset = seconds
        time.time = lambda: self._real_time() + self._offset

    def fill_disk(self, full: bool) -> None:
        """Files cannot become larger than `SMALL_FILE` bytes: writing them fails midway."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE if full else hard, hard))

    def die_writing(self, nth: int, folders: tuple[str, ...]) -> None:
        """`kill -9` just before the nth change of one of these folders."""
        self._left, self._folders = nth, folders
        if not self._hooked:
            sys.addaudithook(self._audit)
            self._hooked = True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._left or event not in WRITES or not self._concerns(str(arguments[0])):
            return
        if event == "open" and not _writes(*arguments[1:]):
            return
        self._left -= 1
        if not self._left:
            die(9)  # type: ignore[arg-type]

    def _concerns(self, path: str) -> bool:
        """A bucket names its files from the folder on that they are in."""
        return path.startswith(self._folders) or (path.startswith(".") and path.endswith(".part"))


def _writes(mode: str | None, flags: int) -> bool:
    return bool(flags & os.O_CREAT) if mode is None else "w" in mode or "+" in mode


class Trainer(Mortal):
    """Its weights are kept in a file of its own, as a trainer's checkpoint is."""

    def __init__(
        self, url: str, folder: Path, truth: Path, seed: int, ranks: tuple[int, int, str], base: Path | None
    ) -> None:
        """`ranks`: this one, how many there are, and the file by which they meet."""
        super().__init__()
        self._url, self._folder, self._truth = url, folder, Truth(truth)
        self._rank, self._size, self._store = ranks
        self._generator = torch.Generator().manual_seed(seed)
        self._sync = 0
        self._publisher: Publisher | None = None
        self._living = base is not None
        self._base = base or folder / "base"
        if base is None:
            self._base.mkdir(parents=True, exist_ok=True)
            (self._base / "config.json").write_text("{}")
        mock.patch("delta_weight_sync.publish.outbox._RETRY_S", RETRY_S).start()
        mock.patch("delta_weight_sync.publish.publisher.open_bucket", self.open_bucket).start()
        self._weights = self._load()
        torch.set_num_threads(1)
        if self._size > 1:
            store = dist.FileStore(self._store, self._size)
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)

    def open(self) -> int | None:
        self._publisher = Publisher(self._url, self._base)
        run = self._publisher._writer
        return run.newest.version if run and run.newest else None

    def step(self, large: bool, full: bool = False) -> Published | None:
        """One optimizer step, on a disk that may be `full`; returns when it is published, on the first rank.

        A `large` one changes so much that an anchor is due.
        """
        assert self._publisher is not None
        self._move(large)
        self._sync += 1
        if self._rank == 0:
            self._tell()
        if full:
            return self._publish_nowhere()
        return self._publish()

    def _publish_nowhere(self) -> Published | None:
        self.fill_disk(True)
        timer = threading.Timer(0.1, self.fill_disk, [False])
        timer.start()
        try:
            return self._publish()
        finally:
            timer.join()

    def _publish(self) -> Published | None:
        assert self._publisher is not None
        self._publisher.publish(self._handed_over(), self._sync)
        newest = self._publisher.flush(FLUSH_S)
        return Published(newest.version, newest.digest, newest.writer, newest.writer_term)

    def _tell(self) -> None:
        assert self._publisher is not None
        assert self._publisher._writer is not None
        bits = {name: to_bits(tensor) for name, tensor in self._weights.items()}
        self._truth.tell(self._publisher._writer.writer.id, self._sync, to_hex(state_digest(bits)))

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
        share, size = (1.0 if large else 0.02), (1e-3 if self._living else 0.1)
        for weight in self._weights.values():
            chosen = torch.rand(weight.shape, generator=self._generator) < share
            weight += chosen * size * torch.randn(weight.shape, generator=self._generator)
        if self._rank == 0:
            new = self._folder / "weights.new.npz"
            np.savez(new, **{name: tensor.numpy() for name, tensor in self._weights.items()})
            new.replace(self._folder / "weights.npz")

    def _load(self) -> dict[str, torch.Tensor]:
        path = self._folder / "weights.npz"
        if not path.exists() and list(self._base.glob("*.safetensors")):
            self._folder.mkdir(exist_ok=True)
            bits = dict(read_bits(self._base))
            return {name: torch.from_numpy(b).view(torch.bfloat16).float() for name, b in bits.items()}
        if not path.exists():
            generator = torch.Generator().manual_seed(0)
            return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        with np.load(path) as file:
            return {name: torch.from_numpy(file[name].copy()) for name in file.files}
