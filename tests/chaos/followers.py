"""The three kinds of followers: one over a stand-in for vLLM, the command `follow`, and a real vLLM."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import psutil
from safetensors import SafetensorError

from delta_weight_sync.checkout import RECORD, follow
from delta_weight_sync.checkpoint import map_folder
from delta_weight_sync.cli import main
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError, EngineError, ProtocolError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest, parse
from delta_weight_sync.signing import SIGNING_KEY
from delta_weight_sync.vllm.follower import Follower
from tests.chaos.faulty import RUN, Mortal, flip_bit
from tests.chaos.trainer import Truth
from tests.live import replica as live
from tests.support import fake_vllm
from tests.support.waiting import soon


class Claim(NamedTuple):
    """What a follower says, and the digest of what it holds; `starts`: of its vLLM."""

    version: int | None
    writer: str
    sync: int
    digest: str
    held: str
    starts: int = 0
    state: str = "serving"
    error: str | None = None
    wrong: tuple[str, ...] = ()


class Engine(fake_vllm.InMemoryVllm):
    """A vLLM that fails if asked to. After each commit it must hold something that a trainer handed over."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self._truth = truth
        self.wrong = list[str]()
        self.fails: str | None = None  # the kind of the next commit's error

    def learn(self, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> str:
        self._trusted = super().learn(shapes, dtypes)
        return self._trusted

    def stage(self, deltas: Sequence[Path]) -> float:
        if self.digest() != self._trusted:
            raise EngineError("the live weights are not those that were committed", "weights-changed")
        try:
            return super().stage(deltas)
        except CodecError as error:
            raise EngineError(f"{error}", "codec") from None

    def commit(self, digest: str, label: str) -> tuple[float, float, float]:
        if kind := self.fails:
            self.fails = None
            raise EngineError(f"{kind}: an injected failure, undone", kind)
        found = to_hex(state_digest(self._new))
        if found != digest:
            raise EngineError(f"the staged changes give {found}, not {digest}", "codec")
        times = super().commit(digest, label)
        self._trusted = digest
        if not self._truth.holds(self.digest()):
            self.wrong.append(f"{label} was committed, and no trainer handed over {self.digest()}")
        return times


class Replica(Mortal):
    """The real follower of a replica, over an `Engine`."""

    def __init__(self, url: str, folder: Path, truth: Path, poll_s: float) -> None:
        super().__init__()
        self.folder = folder
        self.engine = Engine(Truth(truth))
        mock.patch("delta_weight_sync.watch.LONGEST_S", 0.05).start()
        reader = RunReader(self.open_bucket(url), RUN)
        self._follower = Follower(reader, self.engine, name=folder.name, folder=folder, poll_s=poll_s)
        self._follower.start()

    def claim(self) -> Claim:
        serving = self._follower.serving
        status = self._follower.report(1 << 60).status
        said = self.engine.starts, status.state, status.error, tuple(self.engine.wrong)
        if serving is None:
            return Claim(None, "", 0, "", "", *said)
        held = self.engine.digest()
        return Claim(serving.version, serving.writer, serving.sync, serving.digest, held, *said)

    def fail_commit(self, kind: str) -> None:
        self.engine.fails = kind

    def flip_memory(self) -> None:
        next(iter(self.engine.bits.values())).reshape(-1)[0] ^= 1

    def kill_vllm(self) -> None:
        self.engine.kill()

    def damage_anchor(self) -> bool:
        """One bit of the anchor that is kept on the disk; False if none is."""
        for path in (self.folder / "anchors").glob("*/model*.safetensors"):
            flip_bit(path)
            return True
        return False

    def heal(self) -> None:
        self._follower.commands.heal()

    def close(self) -> None:
        self._follower.stop()


class Kept(Mortal):
    """`delta-weight-sync follow`, in a thread: faults are armed by the main one."""

    def __init__(self, url: str, folder: Path, poll_s: float) -> None:
        super().__init__()
        null = os.open(os.devnull, os.O_WRONLY)  # a log on the disk that is full would end it
        os.dup2(null, 1)
        os.dup2(null, 2)
        quick = functools.partial(follow, poll_s=poll_s)
        mock.patch("delta_weight_sync.cli.commands.follow", quick).start()
        mock.patch("delta_weight_sync.watch.LONGEST_S", 4 * poll_s).start()
        mock.patch("delta_weight_sync.reader.open_bucket", self.open_bucket).start()
        mock.patch("delta_weight_sync.cli.commands.ended_by_signals", contextlib.nullcontext).start()
        words = ["follow", f"{url}#{RUN}", "--into", str(folder)]
        threading.Thread(target=self._follow, args=[words], daemon=True).start()

    def _follow(self, words: list[str]) -> None:
        try:
            main(words)
        finally:
            os._exit(1)  # it should never end by itself: the director sees a death

    def close(self) -> None:
        """It ends with its process."""


def read_kept(folder: Path) -> Claim | None:
    """What a reader of the folder sees; None before there is a version, and where it was replaced."""
    try:
        place = (folder / "current").resolve(strict=True)
        manifest = parse(Manifest, (place / RECORD).read_bytes(), RECORD)
        held = to_hex(state_digest(map_folder(place)))
    except (FileNotFoundError, ProtocolError, SafetensorError):
        return None
    return Claim(manifest.version, manifest.writer, manifest.sync, manifest.digest, held)


class Living:
    """A replica with a real vLLM, asked over HTTP. `call` and `alive` are those of an `Actor`."""

    def __init__(self, url: str, folder: Path, environ: Mapping[str, str]) -> None:
        # If all is signed, this process has the trainer's key, which a replica refuses to have.
        self._replica = live.Replica(url, RUN, folder, environ={**environ, SIGNING_KEY: ""})
        self._replica.start()

    @property
    def alive(self) -> bool:
        return psutil.pid_exists(self._replica.pid)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def claim(self) -> Claim | None:
        """Its digest is that of its live weights: each commit reads them back."""
        try:
            status = self._replica.status(1 << 60)["status"]
        except (httpx.HTTPError, OSError):
            return None
        digest = status["digest"] or ""
        return Claim(status["version"], "", 0, digest, digest, 1, status["state"], status["error"])

    def kill_vllm(self) -> None:
        """Kill its engine with -9; returns when the replica reports it."""
        live.engine_of(self._replica).send_signal(signal.SIGKILL)
        soon(lambda: not (claim := self.claim()) or claim.version is None)

    def close(self) -> None:
        self._replica.stop()
