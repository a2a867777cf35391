"""Those who take part in a scene: trainers and followers, each started, killed and asked alike."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos import kept
from tests.chaos.actor import Actor, Died, Failed, Local
from tests.chaos.living import Living
from tests.chaos.replica import RUN, Claim, Replica
from tests.chaos.trainer import Published, Trainer
from tests.support.hubsim import HubSim


@dataclass(frozen=True)
class Place:
    """Where a scene plays."""

    url: str
    folder: Path
    environ: Mapping[str, str]
    hub: HubSim | None = None
    poll_s: float = 0.01
    base: Path | None = None  # the checkpoint that the trainer begins with, if vLLM has to read it

    @property
    def truth(self) -> Path:
        return self.folder / "truth"


class Trainers:
    """One trainer: a process, or one for each of its ranks."""

    def __init__(self, place: Place, seed: int, ranks: int) -> None:
        folder, url = place.folder / "trainer", f"{place.url}#{RUN}"
        store = place.folder / f"ranks-{seed}"
        self.ranks = [
            Actor(
                *(Trainer, url, folder, place.truth, seed, (rank, ranks, str(store)), place.base),
                environ={**place.environ, "TMPDIR": str(_made(place.folder / "tmp"))},
            )
            for rank in range(ranks)
        ]
        self.confirmed = -1  # the newest version of which it was told that it is published

    def open(self) -> None:
        self.call("open")

    def step(self, *, large: bool = False, full: bool = False) -> Published:
        published: Published = self.call("step", large, full)[0]
        self.confirmed = published.version
        return published

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for rank in self.ranks:
            rank.send(method, *arguments)
        return [rank.answer() for rank in self.ranks]

    def first(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer: that one alone writes to the bucket."""
        return self.ranks[0].call(method, *arguments)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        for rank in self.ranks:
            rank.send("close")
        for rank in self.ranks:
            with contextlib.suppress(Died, Failed):
                rank.answer()
            rank.close()


@dataclass
class Member:
    """A follower: in this process, in one of its own, or the command that keeps a folder."""

    name: str
    kind: str
    place: Place
    starts: int = 0  # of its vLLM that there are reasons for
    tainted: int | None = None  # the version during which its memory was changed behind its back
    actor: Any = field(default=None)

    @property
    def folder(self) -> Path:
        return self.place.folder / self.name

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.starts, self.tainted = 1, None
        place = self.place
        if self.kind == "local":
            self.actor = Local(Replica(place.url, self.folder, place.truth, place.poll_s))
        elif self.kind == "process":
            self.actor = Actor(
                *(Replica, place.url, self.folder, place.truth, place.poll_s), environ=place.environ
            )
        elif self.kind == "vllm":
            self.actor = Living(place, self.folder)
        else:
            self.actor = Actor(kept.Kept, place.url, self.folder, place.poll_s, environ=place.environ)

    def claim(self) -> Claim | None:
        """What it says; None where that cannot be known."""
        if self.kind == "kept":
            return kept.read(self.folder)
        try:
            claim: Claim = self.actor.call("claim")
        except Died:
            return None
        return claim

    def revive(self) -> bool:
        if self.actor.alive:
            return False
        self.actor.kill()
        self.start()
        return True

    def end(self, how: signal.Signals | None = None) -> None:
        if how is None or self.kind == "local":
            self.actor.close()
        else:
            self.actor.signal(how)
            self.actor.process.join(30)
            self.actor.kill()

    def lose_disk(self) -> None:
        """It is started on another machine; not for one that runs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def damage_disk(self, rng: Random) -> None:
        """A bit of a file that it kept changes while it does not run, and it starts."""
        claim = self.claim() if self.kind == "kept" else None
        files = [path for path in self.folder.rglob("*.safetensors") if path.is_file()]
        if files:
            path = rng.choice(sorted(files))
            data = bytearray(path.read_bytes())
            data[-1 - rng.randrange(100)] ^= 1
            path.write_bytes(data)
        self.start()
        self.tainted = claim.version if claim else None  # until it has looked


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
