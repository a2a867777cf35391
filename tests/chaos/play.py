"""Scene after scene, until so many faults have struck; then what was survived, and how fast."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from pathlib import Path
from random import Random

from tests.chaos import leaks
from tests.chaos.actor import prepare
from tests.chaos.faults import FAULTS
from tests.chaos.members import Place
from tests.chaos.scene import NotStruck, NotSurvived, Scene

PER_SCENE = 60


class Tally:
    """Counts, and what is printed of it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.struck, self.survived = seed, 0, 0
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def fault(self, kind: str, what: str, seconds: float, notes: list[str]) -> None:
        self.struck, self.survived = self.struck + 1, self.survived + 1
        self._seconds[kind].append(seconds)
        print(f"{self.struck:4d} {kind}: {what}; {seconds:.2f} s {'; '.join(notes)[:300]}".rstrip(), flush=True)

    def lost(self, kind: str, error: Exception, notes: list[str]) -> None:
        self.struck += 1
        print(f"{self.struck:4d} {kind}: NOT SURVIVED: {error}\n     {'; '.join(notes)[:2000]}")
        print(f"     again: python -m tests.chaos --seed {self.seed} --faults {self.struck}", flush=True)

    def end(self) -> bool:
        for kind, seconds in sorted(self._seconds.items()):
            print(f"{kind:32s} {len(seconds):4d} times, median {statistics.median(seconds):6.2f} s")
        for line in [*self.wrong, *self.leaked]:
            print(line)
        print(
            f"faults {self.struck} survived {self.survived} wrong {len(self.wrong)} leaked {len(self.leaked)}"
        )
        return self.struck == self.survived and not self.wrong and not self.leaked


def play(faults: int, seed: int, minutes: float, folder: Path) -> bool:
    """Whether all was survived."""
    logging.getLogger("delta_weight_sync").setLevel(logging.CRITICAL)  # each fault is told of below
    prepare()
    before, tally = leaks.present(), Tally(seed)
    deadline = time.monotonic() + 60 * minutes
    for number in range(faults):
        if tally.struck >= faults or time.monotonic() > deadline:
            break
        _scene(Random(f"{seed} {number}"), folder / f"{number}", min(PER_SCENE, faults - tally.struck), tally)
        tally.leaked += leaks.left(before)
    return tally.end()


def _scene(rng: Random, folder: Path, faults: int, tally: Tally) -> None:
    folder.mkdir()
    place = Place((folder / "bucket").as_uri(), folder, {})
    scene = Scene(place, ranks=1, near=True)
    try:
        goal = tally.struck + faults
        while tally.struck < goal:
            if not _strike(scene, rng, tally):
                return
    finally:
        scene.close()
        tally.wrong += scene.wrong
        tally.leaked += [part for member in scene.members for part in leaks.unfinished(member.folder)]


def _strike(scene: Scene, rng: Random, tally: Tally) -> bool:
    kind = rng.choice(sorted(FAULTS))
    scene.notes.clear()
    started = time.monotonic()
    try:
        what = FAULTS[kind](scene, Random(rng.random()))
        started = time.monotonic()
        scene.recover()
    except NotStruck:
        return True
    except (NotSurvived, AssertionError) as error:
        tally.lost(kind, error, scene.notes)
        return False
    tally.fault(kind, what, time.monotonic() - started, scene.notes)
    return True
