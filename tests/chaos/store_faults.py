"""What can happen to the objects of a bucket, and on the way to it."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.follower_faults import rejoin
from tests.chaos.scene import NotStruck, Scene, Strike
from tests.chaos.vandal import DAMAGES

_REQUESTS = ("HEAD .*/resolve/", "POST .*/batch", "POST .*/paths-info", "GET .*/xet-", "/cas/", "GET .*/tree")


def damaged(kind: str) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        how = rng.choice(DAMAGES)
        key = scene.vandal.call("damage", kind, how, rng.randrange(1 << 30))
        if key is None:
            raise NotStruck
        join = rng.random() < 0.5
        if join:
            rejoin(scene, rng)
        return f"{key} {how}{', and one joins' if join else ''}"

    return strike


def replayed(scene: Scene, rng: Random) -> str:
    scene.vandal.call("remember")
    for _ in range(3):
        scene.publish()
        scene.vandal.call("remember")
    return f"an old HEAD is put at {scene.vandal.call('replay', rng.randrange(1 << 30))}"


def replaced(scene: Scene, rng: Random) -> str:
    scene.trainer.kill()
    scene.vandal.call("wipe")
    scene.trainer = scene.new_trainer()
    scene.open_trainer()
    return "the run is deleted and started over"


def collected(scene: Scene, rng: Random) -> str:
    scene.vandal.call("collect")
    return "gc deletes what is not needed"


def hub(**how: Any) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        hub, match, times = scene.place.hub, rng.choice(_REQUESTS), rng.randint(1, 3)
        assert hub is not None
        hub.fault(match, times=times, **how)
        scene.publish()
        return f"{match} {how}, {times} times"

    return strike


def away(scene: Scene, rng: Random) -> str:
    """As a volume that is not mounted; the trainer and all followers notice."""
    bucket = Path(scene.place.url.removeprefix("file://"))
    bucket.rename(aside := bucket.with_name("away"))
    time.sleep(rng.uniform(0.05, 0.3))
    aside.rename(bucket)
    return "the bucket's folder is away for a while"
