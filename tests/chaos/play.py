"""Scene after scene, until so many faults have struck."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest import mock

from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, SigningKey
from tests.chaos import leaks
from tests.chaos.actor import PATIENCE_S, Died, Failed, prepare
from tests.chaos.faults import ANYWHERE, ON_DISK, ON_HUB, WITH_VLLM
from tests.chaos.members import Place
from tests.chaos.scene import NotStruck, NotSurvived, Scene, Strike
from tests.chaos.stores import STORES
from tests.chaos.tally import Tally

ALL = {"near": "local", "far": "process", "kept": "kept"}
REMOTE = {"far": "process", "kept": "kept"}  # nothing of a store's client stays in this process


@dataclass(frozen=True)
class Setting:
    """What a scene is played with, and how many faults strike in it."""

    faults: int
    store: str = "file"
    ranks: int = 1
    cast: Mapping[str, str] = field(default_factory=lambda: ALL)
    kinds: Mapping[str, Strike] = field(default_factory=lambda: ON_DISK)
    poll_s: float = 0.01
    patience_s: float = PATIENCE_S


FOLDER = Setting(60)
OTHERS = (  # only where there are many faults
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


def play(faults: int, seed: int, minutes: float, folder: Path) -> bool:
    """Whether all was survived. With odd seeds everything is signed."""
    logging.getLogger("delta_weight_sync").setLevel(logging.CRITICAL)  # the tally tells of each fault
    environ = {"HF_HOME": str(folder / "client"), "OMP_NUM_THREADS": "1", **(_keys(seed) if seed % 2 else {})}
    with mock.patch.dict(os.environ, environ):
        prepare()
        before, tally = leaks.present(), Tally(seed, time.monotonic() + 60 * minutes)
        for number, setting in enumerate(settings(faults)):
            _play(setting, Random(f"{seed} {number}"), folder / f"{number}", tally)
            tally.leaked += leaks.left(before)
    return tally.end(faults)


def _keys(seed: int) -> dict[str, str]:
    secret = f"ed25519_secret_{seed:064x}"
    return {SIGNING_KEY: secret, PUBLIC_KEY: SigningKey(secret).public}


def _play(setting: Setting, rng: Random, folder: Path, tally: Tally) -> None:
    """One scene after the other in this setting, each until something is not survived."""
    goal, number = tally.struck + setting.faults, 0
    folder.mkdir()
    with STORES[setting.store](folder) as store:
        while tally.goes_on(goal):
            number += 1
            base = _base(folder) if "vllm" in setting.cast.values() else None
            where = Path(tempfile.mkdtemp(dir=folder))
            url = f"{store.url}/{where.name}"
            environ = {name: value for name, value in os.environ.items() if name in (SIGNING_KEY, PUBLIC_KEY)}
            place = Place(url, where, {**environ, **store.environ}, store.hub, setting.poll_s, base)
            _scene(setting, place, rng, goal, tally)


def _base(folder: Path) -> Path:
    """A checkpoint, made by another process: transformers leaves a thread behind."""
    base = folder / "base"
    if not base.exists():
        command = [sys.executable, "examples/tiny_policy.py", str(base)]
        subprocess.run(command, check=True, capture_output=True)
    return base


def _scene(setting: Setting, place: Place, rng: Random, goal: int, tally: Tally) -> None:
    started = time.monotonic()
    scene = Scene(place, ranks=setting.ranks, cast=setting.cast, patience_s=setting.patience_s)
    try:
        scene.start()
        if place.base:
            tally.vllm_started(time.monotonic() - started)
        while tally.goes_on(goal) and _strike(setting, scene, rng, tally):
            pass
    except LOST as error:
        tally.lost("the beginning", error, scene.notes)
    finally:
        scene.close()
        tally.wrong += scene.wrong
        tally.leaked += [part for member in scene.members for part in leaks.unfinished(member.folder)]


def _strike(setting: Setting, scene: Scene, rng: Random, tally: Tally) -> bool:
    """False if the scene cannot go on."""
    kind = rng.choice(sorted(setting.kinds))
    scene.notes.clear()
    try:
        what = _happens(setting.kinds[kind], scene, Random(rng.random()))
        started = time.monotonic()
        scene.recover()
    except LOST as error:
        tally.lost(kind, error, scene.notes)
        return False
    finally:
        if scene.place.hub:
            scene.place.hub.clear()
    if what:
        tally.fault(kind, what, time.monotonic() - started, scene.notes, vllm=bool(scene.place.base))
    return True


def _happens(strike: Strike, scene: Scene, rng: Random) -> str:
    try:
        return strike(scene, rng)
    except NotStruck:
        return ""
