"""What can happen to a trainer."""

from __future__ import annotations

import contextlib
import signal
import threading
from random import Random

from tests.chaos.actor import Died, Failed
from tests.chaos.faulty import Fault
from tests.chaos.members import Trainers
from tests.chaos.scene import DAY_S, NotStruck, NotSurvived, Scene, Strike

UPLOADS = ("put", "list", "delete")


def operation(what: str, *, reads: bool = False, times: int = 1) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        nth = rng.randint(1, 6)
        ops = ("get", "list", "fetch") if reads else UPLOADS if what not in ("tear", "flip") else ("put",)
        count = rng.randint(1, times)
        scene.trainer.first("arm", Fault(what, nth, count, ops))
        with contextlib.suppress(Died, Failed):
            for _ in range(8):
                scene.trainer.step(large=rng.random() < 0.2)
                if scene.trainer.first("struck"):
                    scene.trainer.first("arm", None)
                    return f"{what}, operation {nth} of the trainer, {count} times"
            raise NotStruck
        return f"{what}, operation {nth} of the trainer"

    return strike


def opening(what: str) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        nth, ops = rng.randint(1, 8), ("put", "list", "delete", "get")
        scene.replace_trainer(opened=False)
        scene.trainer.first("arm_later", Fault(what, nth, 2, ops))
        scene.open_trainer()
        with contextlib.suppress(Died, Failed):
            scene.trainer.first("arm", None)
        return f"{what}, operation {nth} of a trainer that takes over"

    return strike


def disk_change(scene: Scene, rng: Random) -> str:
    nth = rng.randint(1, 12)
    scene.trainer.first("die_writing", nth, (str(scene.place.folder),))
    with contextlib.suppress(Died, Failed):
        for _ in range(12):
            scene.trainer.step(large=rng.random() < 0.3)
        raise NotStruck
    return f"kill -9 of the trainer at disk change {nth}"


def signalled(scene: Scene, rng: Random) -> str:
    """At a random moment of a step."""
    how, after = rng.choice([signal.SIGKILL, signal.SIGTERM]), rng.uniform(0.0, 0.05)
    victim = rng.choice(scene.trainer.ranks)
    timer = threading.Timer(after, victim.signal, [how])
    timer.start()
    with contextlib.suppress(Died, Failed):
        while True:
            scene.trainer.step()
    timer.join()
    return f"{how.name} to the trainer after {1e3 * after:.0f} ms"


def clock(scene: Scene, rng: Random) -> str:
    seconds = rng.choice([-3650, -1, -0.01, 0.01, 1, 3650]) * DAY_S
    scene.trainer.call("jump", seconds)
    return f"the trainer's clock jumps by {seconds / DAY_S} days"


def disk_full(scene: Scene, rng: Random) -> str:
    scene.publish(large=rng.random() < 0.7, full=True)
    return "the trainer's disk is full"


def second(scene: Scene, rng: Random) -> str:
    """The one that was there must be told, and its version must not count."""
    other = scene.new_trainer()
    try:
        other.open()
        _must_be_fenced(scene)
    finally:
        scene.trainer.kill()
        scene.trainer = other
    return "a second trainer takes over"


def _must_be_fenced(scene: Scene) -> None:
    try:
        published = scene.trainer.step()
    except Failed as error:
        if error.kind not in ("FencedError", "PeerError"):
            raise NotSurvived(f"the fenced trainer says {error}") from None
    else:
        raise NotSurvived(f"two trainers own the run: version {published.version} was confirmed to the first")


def three(scene: Scene, rng: Random) -> str:
    """Started at the same instant; at most one may be told that its version is published."""
    others = [scene.new_trainer(), scene.new_trainer()]
    trainers = [scene.trainer, *others]
    for other in others:
        for rank in other.ranks:
            rank.send("open")
    opened = [_opened(other) for other in others]
    published = [trainer for trainer in trainers if _publishes(trainer)]
    if len(published) > 1:
        raise NotSurvived(f"{len(published)} trainers own the run")
    scene.trainer = published[0] if published else trainers[0]
    for trainer in trainers:
        if trainer is not scene.trainer:
            trainer.kill()
    return f"three trainers, {sum(opened)} of the two new ones opened the run"


def _opened(trainer: Trainers) -> bool:
    try:
        for rank in trainer.ranks:
            rank.answer()
    except (Died, Failed):
        return False
    return True


def _publishes(trainer: Trainers) -> bool:
    try:
        trainer.step()
    except (Died, Failed):
        return False
    return True
