"""Real followers over a vLLM that is stood in for: it holds the weights in memory, and does as vLLM does."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError, EngineError
from delta_weight_sync.reader import RunReader, apply_delta
from delta_weight_sync.vllm.follower import Follower
from tests.chaos.trainer import Mortal
from tests.chaos.truth import Truth

RUN = "chaos"


class Claim(NamedTuple):
    """What a replica says, and the digest of what it holds; `starts`: of its vLLM."""

    version: int | None
    writer: str
    sync: int
    digest: str
    held: str
    starts: int
    state: str
    error: str | None
    wrong: tuple[str, ...]


class Memory:
    """The engine. After each commit what it holds must be something that a trainer handed over."""

    def __init__(self, truth: Truth) -> None:
        self.starts, self.wrong, self._truth = 0, [], truth
        self.fails: str | None = None  # the kind of the next commit's error
        self._alive, self._assets, self._bits, self._trusted = False, {}, {}, ""
        self._new: dict[str, Any] = {}

    def alive(self) -> bool:
        return self._alive

    def serves(self, checkpoint: Path) -> bool:
        return self._alive and _assets(checkpoint) == self._assets

    def start(self, checkpoint: Path) -> None:
        self._bits, self._assets = dict(read_bits(checkpoint)), _assets(checkpoint)
        self._alive, self.starts = True, self.starts + 1

    def stop(self) -> None:
        self._alive = False

    def learn(self, shapes: dict[str, list[int]]) -> str:
        self._trusted = self.digest()
        return self._trusted

    def digest(self) -> str:
        return to_hex(state_digest(self._bits))

    def flip(self) -> None:
        next(iter(self._bits.values())).reshape(-1)[0] ^= 1

    def stage(self, deltas: Sequence[Path]) -> float:
        if self.digest() != self._trusted:
            raise EngineError("the live weights are not those that were committed", "weights-changed")
        self._new = {name: bits.copy() for name, bits in self._bits.items()}
        try:
            for path in deltas:
                apply_delta(self._new, path)
        except CodecError as error:
            raise EngineError(f"{error}", "codec") from None
        return 0.0

    def stage_checkpoint(self, folder: Path) -> float:
        self._new = dict(read_bits(folder))
        return 0.0

    def commit(self, digest: str, label: str) -> tuple[float, float]:
        if kind := self.fails:
            self.fails = None
            raise EngineError(f"{kind}: an injected failure, undone", kind)
        found = to_hex(state_digest(self._new))
        if found != digest:
            raise EngineError(f"the delta leads to {found}, published was {digest}", "codec")
        self._bits, self._trusted = self._new, digest
        if not self._truth.holds(self.digest()):
            self.wrong.append(f"{label} was committed, and nobody handed over {self.digest()}")
        return 0.0, 0.0

    def relabel(self, label: str) -> None:
        pass


class Replica(Mortal):
    def __init__(self, url: str, folder: Path, truth: Path, poll_s: float) -> None:
        super().__init__()
        self.folder = folder
        self._truth, self._lock = Truth(truth), threading.Lock()
        mock.patch("delta_weight_sync.watch.LONGEST_S", 0.05).start()
        self.engine = Memory(self._truth)
        reader = RunReader(self.open_bucket(url), RUN)
        self._follower = Follower(reader, self.engine, name=folder.name, folder=folder, poll_s=poll_s)
        self._follower.start()

    def claim(self) -> Claim:
        serving, status = self._follower.serving, self._follower.report(1 << 60).status
        return Claim(
            serving.version if serving else None,
            serving.writer if serving else "",
            serving.sync if serving else 0,
            serving.digest if serving else "",
            self.engine.digest() if serving else "",
            self.engine.starts,
            status.state,
            status.error,
            tuple(self.engine.wrong),
        )

    def fail_commit(self, kind: str) -> None:
        self.engine.fails = kind

    def flip_memory(self) -> None:
        self.engine.flip()

    def kill_vllm(self) -> None:
        self.engine.stop()

    def damage_anchor(self) -> bool:
        """One bit of the anchor that is kept on the disk; False where none is."""
        for path in (self.folder / "anchors").glob("*/model.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            return True
        return False

    def lose_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def heal(self) -> None:
        self._follower.commands.heal()

    def close(self) -> None:
        self._follower.stop()


def _assets(checkpoint: Path) -> dict[str, str]:
    files = (path for path in checkpoint.iterdir() if path.suffix != ".safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
