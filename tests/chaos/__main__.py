"""`python -m tests.chaos --faults N --seed S [--minutes M]`: N faults; every one must be survived.

Real publishers and followers, and faults of every kind, drawn from the seed. At every moment what a follower
claims to serve must be what a trainer handed over; after each fault all must reach the newest version.
"""

import argparse
import contextlib
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest import mock

import psutil

from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, SigningKey
from tests.buckets import XET_PAUSE
from tests.chaos.actor import PATIENCE_S, Died, Failed, prepare
from tests.chaos.faults import ANYWHERE, ON_DISK, ON_HUB, WITH_VLLM
from tests.chaos.scene import NotStruck, NotSurvived, Place, Scene, Strike
from tests.support.hubsim import HubSim
from tests.support.waiting import soon
from trainer.demo.processes import free_port

ALL = {"near": "local", "far": "process", "kept": "kept"}
REMOTE = {"far": "process", "kept": "kept"}  # nothing of a store's client stays in this process


class Setting(NamedTuple):
    """What a scene is played with, and how many faults strike in it."""

    faults: int
    store: str = "file"
    ranks: int = 1
    cast: Mapping[str, str] = ALL
    kinds: Mapping[str, Strike] = ON_DISK
    poll_s: float = 0.01
    patience_s: float = PATIENCE_S


FOLDER = Setting(60)
OTHERS = (  # only if there are many faults
    Setting(30, ranks=2),
    Setting(30, store="hub", cast=REMOTE, kinds=ON_HUB, poll_s=0.1),
    Setting(30, store="s3", cast=REMOTE, kinds=ANYWHERE, poll_s=0.1),
    Setting(15, cast={"vLLM": "vllm", **REMOTE}, kinds=WITH_VLLM, patience_s=900.0),
)
MANY = 300
LOST = (NotSurvived, AssertionError, Died, Failed)


def settings(faults: int) -> list[Setting]:
    chosen = list(OTHERS) if faults >= MANY else []
    left = faults - sum(setting.faults for setting in chosen)
    return [*chosen, *(Setting(min(FOLDER.faults, left - n)) for n in range(0, left, FOLDER.faults))]


class Tally:
    """Counts faults. `wrong` and `leaked` are sentences, one for each."""

    def __init__(self, seed: int, deadline: float) -> None:
        self.seed = seed
        self.struck = 0
        self.survived = 0
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self._deadline = deadline
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def goes_on(self, goal: int) -> bool:
        return self.struck < goal and time.monotonic() < self._deadline

    def fault(self, kind: str, what: str, seconds: float, notes: list[str]) -> None:
        """One was survived: all were at the newest version `seconds` after it had happened."""
        self.struck += 1
        self.survived += 1
        self._seconds[kind].append(seconds)
        said = "; ".join(notes)[:300]
        print(f"{self.struck:4d} {kind}: {what}; {seconds:.2f} s {said}".rstrip(), flush=True)

    def lost(self, kind: str, error: Exception, notes: list[str]) -> None:
        self.struck += 1
        print(f"{self.struck:4d} {kind}: NOT SURVIVED: {error}\n     {'; '.join(notes)[:2000]}")
        print(f"     again: python -m tests.chaos --seed {self.seed}, fault {self.struck}", flush=True)

    def end(self, faults: int) -> bool:
        for kind, seconds in sorted(self._seconds.items()):
            print(f"{kind:32s} {len(seconds):4d} times, median {statistics.median(seconds):6.2f} s")
        for line in [*self.wrong, *self.leaked]:
            print(line)
        counts = f"wrong {len(self.wrong)} leaked {len(self.leaked)}"
        print(f"faults {self.struck} survived {self.survived} {counts}", flush=True)
        return self.struck == self.survived >= faults and not self.wrong and not self.leaked


def play(faults: int, seed: int, minutes: float, folder: Path) -> bool:
    """Whether all was survived. With odd seeds everything is signed."""
    logging.getLogger("delta_weight_sync").setLevel(logging.CRITICAL)  # the tally prints each fault
    secret = f"ed25519_secret_{seed:064x}"
    keys = {SIGNING_KEY: secret, PUBLIC_KEY: SigningKey(secret).public} if seed % 2 else {}
    with mock.patch.dict(os.environ, {"HF_HOME": str(folder / "client"), "OMP_NUM_THREADS": "1", **keys}):
        prepare()
        before = _held()
        tally = Tally(seed, time.monotonic() + 60 * minutes)
        for number, setting in enumerate(settings(faults)):
            _play(setting, keys, Random(f"{seed} {number}"), folder / f"{number}", tally)
            tally.leaked += sorted(_held() - before)
    return tally.end(faults)


def _held() -> set[str]:
    """The children, threads, open files and sockets of this process."""
    me = psutil.Process()
    files = set[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder that is listed
            files.add(f"file: {link.name} {link.readlink()}")
    threads = {f"thread: {thread.name} {thread.ident}" for thread in threading.enumerate()}
    return files | threads | {f"process: {child.pid} {child.name()}" for child in me.children(recursive=True)}


def _play(setting: Setting, keys: dict[str, str], rng: Random, folder: Path, tally: Tally) -> None:
    """One scene after the other in this setting, each until something is not survived."""
    goal = tally.struck + setting.faults
    folder.mkdir()
    with STORES[setting.store](folder) as (url, environ, hub):
        base = folder / "base" if "vllm" in setting.cast.values() else None
        if base:  # made by another process: transformers leaves a thread behind
            command = [sys.executable, "-m", "tests.support.tiny_policy", str(base)]
            subprocess.run(command, check=True, capture_output=True)
        while tally.goes_on(goal):
            where = Path(tempfile.mkdtemp(dir=folder))
            place = Place(f"{url}/{where.name}", where, {**keys, **environ}, hub, setting.poll_s, base)
            _scene(setting, place, rng, goal, tally)


def _scene(setting: Setting, place: Place, rng: Random, goal: int, tally: Tally) -> None:
    scene = Scene(place, ranks=setting.ranks, cast=setting.cast, patience_s=setting.patience_s)
    try:
        scene.start()
        while tally.goes_on(goal) and _strike(setting, scene, rng, tally):
            pass
    except LOST as error:
        tally.lost("the beginning", error, scene.notes)
    finally:
        scene.close()
        tally.wrong += scene.wrong
        for member in scene.members:  # files that no version needs
            left = [*member.folder.rglob(".*.part"), *member.folder.glob("*.safetensors")]
            tally.leaked += [str(path.relative_to(place.folder)) for path in left]


def _strike(setting: Setting, scene: Scene, rng: Random, tally: Tally) -> bool:
    """False if the scene cannot go on."""
    kind = rng.choice(sorted(setting.kinds))
    what = ""
    scene.notes.clear()
    try:
        with contextlib.suppress(NotStruck):
            what = setting.kinds[kind](scene, Random(rng.random()))
        started = time.monotonic()
        scene.recover()
    except LOST as error:
        tally.lost(kind, error, scene.notes)
        return False
    finally:
        if scene.place.hub:
            scene.place.hub.clear()
    if what:
        tally.fault(kind, what, time.monotonic() - started, scene.notes)
    return True


# A bucket's URL, what its clients need in their environment, and the Hub if it is there.
Store = tuple[str, Mapping[str, str], HubSim | None]


@contextlib.contextmanager
def _folder(place: Path) -> Iterator[Store]:
    yield (place / "bucket").as_uri(), {}, None


@contextlib.contextmanager
def _hub(place: Path) -> Iterator[Store]:
    (place / "hub").mkdir()
    with HubSim(place / "hub") as hub:
        yield "hf://buckets/team/chaos/runs", hub.env(place / "home") | XET_PAUSE, hub


@contextlib.contextmanager
def _s3(place: Path) -> Iterator[Store]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    try:
        soon(lambda: _listens(port), "the simulated S3 does not listen")
        yield f"s3://chaos/{place.name}", keys | endpoint, None
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


STORES = {"file": _folder, "hub": _hub, "s3": _s3}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        sys.exit(0 if play(options.faults, options.seed, options.minutes, Path(folder)) else 1)


if __name__ == "__main__":
    main()
