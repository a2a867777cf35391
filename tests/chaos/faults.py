"""What can go wrong: each function lets one thing happen to a scene, and says what it was."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.actor import Died, Failed
from tests.chaos.faulty import Fault
from tests.chaos.scene import NotStruck, NotSurvived, Scene
from tests.chaos.vandal import DAMAGES, KINDS

Strike = Callable[[Scene, Random], str]
UPLOADS = ("put", "list", "delete")
DAY_S = 86400.0


def _trainer_operation(what: str, *, reads: bool = False, times: int = 1) -> Strike:
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


def _opening(what: str) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        nth, ops = rng.randint(1, 8), ("put", "list", "delete", "get")
        scene.replace_trainer(opened=False)
        scene.trainer.first("arm_later", Fault(what, nth, 2, ops))
        scene.open_trainer()
        with contextlib.suppress(Died, Failed):
            scene.trainer.first("arm", None)
        return f"{what}, operation {nth} of a trainer that takes over"

    return strike


def _trainer_disk(scene: Scene, rng: Random) -> str:
    nth = rng.randint(1, 12)
    scene.trainer.first("die_writing", nth, (str(scene.place.folder),))
    with contextlib.suppress(Died, Failed):
        for _ in range(12):
            scene.trainer.step(large=rng.random() < 0.3)
        raise NotStruck
    return f"kill -9 of the trainer at disk change {nth}"


def _trainer_signal(scene: Scene, rng: Random) -> str:
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


def _trainer_clock(scene: Scene, rng: Random) -> str:
    seconds = rng.choice([-3650, -1, -0.01, 0.01, 1, 3650]) * DAY_S
    scene.trainer.call("jump", seconds)
    return f"the trainer's clock jumps by {seconds / DAY_S} days"


def _trainer_full(scene: Scene, rng: Random) -> str:
    scene.publish(large=rng.random() < 0.7, full=True)
    return "the trainer's disk is full"


def _second(scene: Scene, rng: Random) -> str:
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


def _three(scene: Scene, rng: Random) -> str:
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


def _opened(trainer: object) -> bool:
    try:
        for rank in trainer.ranks:  # type: ignore[attr-defined]
            rank.answer()
    except (Died, Failed):
        return False
    return True


def _publishes(trainer: object) -> bool:
    try:
        trainer.step()  # type: ignore[attr-defined]
    except (Died, Failed):
        return False
    return True


def _object(kind: str) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        how = rng.choice(DAMAGES)
        key = scene.vandal.call("damage", kind, how, rng.randrange(1 << 30))
        if key is None:
            raise NotStruck
        join = rng.random() < 0.5
        if join:
            _rejoin(scene, rng)
        return f"{key} {how}{', and one joins' if join else ''}"

    return strike


def _replayed(scene: Scene, rng: Random) -> str:
    scene.vandal.call("remember")
    for _ in range(3):
        scene.publish()
        scene.vandal.call("remember")
    return f"an old HEAD is put at {scene.vandal.call('replay', rng.randrange(1 << 30))}"


def _replaced(scene: Scene, rng: Random) -> str:
    scene.trainer.kill()
    scene.vandal.call("wipe")
    scene.trainer = scene.new_trainer()
    scene.open_trainer()
    return "the run is deleted and started over"


def _gc(scene: Scene, rng: Random) -> str:
    scene.vandal.call("gc")
    return "gc deletes what is not needed"


def _follower_operation(what: str, ops: tuple[str, ...], times: int = 1) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        kinds = ("process", "kept") if "kill" in what or "term" in what else ()
        member, nth, count = scene.choose(rng, *kinds), rng.randint(1, 5), rng.randint(1, times)
        scene.arm(member, Fault(what, nth, count, ops))
        return f"{what}, operation {nth} of {member.name}, {count} times"

    return strike


def _follower_disk(scene: Scene, rng: Random) -> str:
    member, nth = scene.choose(rng, "process", "kept"), rng.randint(1, 12)
    member.actor.call("die_writing", nth, (str(member.folder),))
    rejoin = (lambda: None) if member.kind == "kept" else (lambda: member.actor.call("heal"))
    scene.until_struck(lambda: not member.actor.alive, rejoin)
    return f"kill -9 of {member.name} at disk change {nth}"


def _follower_signal(scene: Scene, rng: Random) -> str:
    member, how = scene.choose(rng, "process", "kept"), rng.choice([signal.SIGKILL, signal.SIGTERM])
    after = rng.uniform(0.0, 0.05)
    timer = threading.Timer(after, member.actor.signal, [how])
    timer.start()
    scene.publish()
    timer.join()
    return f"{how.name} to {member.name} after {1e3 * after:.0f} ms"


def _follower_full(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.actor.call("fill_disk", True)
    if member.kind == "process" and rng.random() < 0.7:
        member.actor.call("heal")  # a whole version is laid out
    scene.publish(large=True)
    time.sleep(0.2)
    scene.check(member)
    member.actor.call("fill_disk", False)
    return f"the disk of {member.name} is full"


def _follower_clock(scene: Scene, rng: Random) -> str:
    member, seconds = scene.choose(rng, "process", "kept"), rng.choice([-3650, -1, 1, 3650]) * DAY_S
    member.actor.call("jump", seconds)
    return f"the clock of {member.name} jumps by {seconds / DAY_S:.0f} days"


def _memory(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    claim = member.claim()
    member.tainted = claim.version if claim else None
    member.actor.call("flip_memory")
    return f"a bit of the weights in {member.name} flips"


def _commit(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    kind = rng.choice(["StepCommitError", "OutOfMemoryError", "CodecError", "RouteError"])
    member.actor.call("fail_commit", kind)
    return f"a commit of {member.name} fails with {kind}"


def _vllm_dies(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process", "vllm")
    member.starts += 1
    member.actor.call("kill_vllm")
    return f"vLLM of {member.name} dies"


def _anchor_on_disk(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    if not member.actor.call("damage_anchor"):
        raise NotStruck
    member.actor.call("heal")
    return f"the anchor that {member.name} keeps is damaged, and it is healed"


def _rejoin(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process", "kept")
    member.end()
    member.lose_disk()
    member.start()
    return f"{member.name} joins on another machine"


def _disk_while_down(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.end(signal.SIGKILL)
    member.damage_disk(rng)
    return f"the disk of {member.name} is damaged while it is down"


def _hub(**how: Any) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        hub, match, times = scene.place.hub, rng.choice(_REQUESTS), rng.randint(1, 3)
        assert hub is not None
        hub.fault(match, times=times, **how)
        scene.publish()
        return f"{match} {how}, {times} times"

    return strike


def _away(scene: Scene, rng: Random) -> str:
    """As a volume that is not mounted; the trainer and all followers notice."""
    bucket = Path(scene.place.url.removeprefix("file://"))
    bucket.rename(aside := bucket.with_name("away"))
    time.sleep(rng.uniform(0.05, 0.3))
    aside.rename(bucket)
    return "the bucket's folder is away for a while"


_REQUESTS = ("HEAD .*/resolve/", "POST .*/batch", "POST .*/paths-info", "GET .*/xet-", "/cas/", "GET .*/tree")
FETCHES, LOOKS = ("get", "fetch"), ("stat", "list", "get")
_DEATHS = ("kill before", "kill within", "kill after", "term before", "term after")
ANYWHERE: dict[str, Strike] = {
    **{f"trainer {what}": _trainer_operation(what) for what in _DEATHS},
    **{
        f"trainer opens, {what}": _opening(what)
        for what in ("kill before", "kill after", "refuse", "stale", "hide")
    },
    "trainer 503": _trainer_operation("refuse", times=4),
    "trainer answer lost": _trainer_operation("lose answer", times=2),
    "trainer stall": _trainer_operation("stall"),
    "trainer torn upload": _trainer_operation("tear", times=2),
    "trainer flipped upload": _trainer_operation("flip"),
    "trainer disk change": _trainer_disk,
    "trainer signal": _trainer_signal,
    "trainer clock": _trainer_clock,
    "trainer disk full": _trainer_full,
    "second trainer": _second,
    "three trainers": _three,
    **{f"object {kind.rstrip('/')}": _object(kind) for kind in KINDS},
    "HEAD replayed": _replayed,
    "run replaced": _replaced,
    **{
        f"follower {what}": _follower_operation(what, FETCHES)
        for what in ("kill before", "kill after", "term after")
    },
    "follower 503": _follower_operation("refuse", FETCHES + LOOKS, times=6),
    "follower torn download": _follower_operation("tear", FETCHES, times=2),
    "follower flipped download": _follower_operation("flip", FETCHES, times=2),
    "follower hidden object": _follower_operation("hide", FETCHES + LOOKS, times=3),
    "follower stale answer": _follower_operation("stale", LOOKS, times=6),
    "follower stall": _follower_operation("stall", FETCHES),
    "follower disk change": _follower_disk,
    "follower signal": _follower_signal,
    "follower disk full": _follower_full,
    "follower clock": _follower_clock,
    "memory flips": _memory,
    "commit fails": _commit,
    "vLLM dies": _vllm_dies,
    "kept anchor damaged": _anchor_on_disk,
    "follower joins": _rejoin,
    "disk damaged while down": _disk_while_down,
}
ON_DISK: dict[str, Strike] = {**ANYWHERE, "bucket away": _away}
ON_HUB: dict[str, Strike] = {
    **ANYWHERE,
    "Hub 429": _hub(status=429, headers={"Retry-After": "1"}),
    "Hub 500": _hub(status=500),
    "Hub 503": _hub(status=503),
    "Hub hangs up": _hub(drop=True),
    "Hub stalls": _hub(delay=0.5),
    "Hub truncates": _hub(truncate=10),
    "Hub flips": _hub(flip=9),
}
_NOT_VLLM = ("follower ", "memory", "commit", "kept anchor", "disk damaged")
WITH_VLLM: dict[str, Strike] = {
    name: strike for name, strike in ON_DISK.items() if not name.startswith(_NOT_VLLM) and name != "vLLM dies"
}
