"""An engine without vLLM for tests of followers: it holds the weights in a dictionary."""

import time
from collections.abc import Sequence
from pathlib import Path

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.engine import Engine, Times
from delta_weight_sync.errors import EngineError
from delta_weight_sync.vllm import PROCESSED
from delta_weight_sync.vllm.follower import Follower
from tests.support.waiting import soon


class InMemoryVllm(Engine):
    """The smallest engine that a follower can use. It can be killed, and has to be started again for another
    configuration or tokenizer, as a Space's vLLM.

    It counts its starts, how often it was asked whether it is alive (once in each turn of the follower), and
    the checkpoints that it staged.
    """

    what = "vLLM"

    def __init__(self) -> None:
        self.starts = 0
        self.asked = 0
        self.compared = 0
        self._alive = False
        self._read: dict[str, bytes] = {}

    def describe(self) -> str:
        return "a vLLM in memory"

    def sampling(self) -> tuple[str, dict[str, float]]:
        return (PROCESSED if self._alive else ""), {}

    def alive(self) -> bool:
        self.asked += 1
        return self._alive

    def serves(self, checkpoint: Path) -> bool:
        return self._alive and _assets(checkpoint) == self._read

    def start(self, checkpoint: Path) -> None:
        self._read = _assets(checkpoint)
        self.bits = dict(read_bits(checkpoint))
        self._alive = True
        self.starts += 1

    def stop(self) -> None:
        self._alive = False

    kill = stop

    def learn(self, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> str:
        assert shapes == {name: list(bits.shape) for name, bits in self.bits.items()}
        return self.digest()

    def digest(self) -> str:
        return to_hex(state_digest(self.bits))

    def take(self, deltas: Sequence[Path], digest: str, label: str) -> Times:
        return self.stage(deltas), *self.commit(digest, label)

    def take_checkpoint(self, folder: Path, digest: str, label: str) -> Times:
        return self.stage_checkpoint(folder), *self.commit(digest, label)

    def stage(self, deltas: Sequence[Path]) -> float:
        self._new = {name: bits.copy() for name, bits in self.bits.items()}
        for path in deltas:
            shapes = {name: bits.shape for name, bits in self._new.items()}
            for patch in codec.Delta(path).patches(shapes, self._new.__getitem__):
                codec.apply(patch, self._new[patch.name])
        return 0.0

    def stage_checkpoint(self, folder: Path) -> float:
        self._new = dict(read_bits(folder))
        self.compared += 1
        return 0.0

    def commit(self, digest: str, label: str) -> tuple[float, float, float]:
        if to_hex(state_digest(self._new)) != digest:
            raise EngineError("other weights than were published")
        self.bits = self._new
        self.label = label
        return 0.0, 0.0, time.time()

    def relabel(self, label: str) -> None:
        self.label = label


def _assets(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix != ".safetensors"}


def wait_until_serving(follower: Follower, version: int) -> None:
    soon(
        lambda: follower.serving is not None and follower.serving.version == version,
        lambda: f"version {version}: {follower.report(0).status}",
    )
