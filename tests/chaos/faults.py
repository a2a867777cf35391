"""Everything that can go wrong, by name: each fault strikes a scene once and returns its description."""

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.actor import Died, Failed
from tests.chaos.faulty import DAMAGES, KINDS, Fault
from tests.chaos.scene import NotStruck, NotSurvived, Scene, Strike, Trainers

DAY_S = 86400.0
UPLOADS = ("put", "list", "delete")
FETCHES = ("get", "fetch")
LOOKS = ("stat", "list", "get")


def trainer_operation(what: str, times: int = 1) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        nth = rng.randint(1, 6)
        ops = ("put",) if what in ("tear", "flip") else UPLOADS
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
        nth = rng.randint(1, 8)
        scene.replace_trainer(opened=False)
        scene.trainer.first("arm_later", Fault(what, nth, 2, (*UPLOADS, "get")))
        scene.open_trainer()
        with contextlib.suppress(Died, Failed):
            scene.trainer.first("arm", None)
        return f"{what}, operation {nth} of a trainer that takes over"

    return strike


def trainer_disk_change(scene: Scene, rng: Random) -> str:
    nth = rng.randint(1, 12)
    scene.trainer.first("die_writing", nth, str(scene.place.folder))
    with contextlib.suppress(Died, Failed):
        for _ in range(12):
            scene.trainer.step(large=rng.random() < 0.3)
        raise NotStruck
    return f"kill -9 of the trainer at disk change {nth}"


def trainer_signalled(scene: Scene, rng: Random) -> str:
    how = rng.choice([signal.SIGKILL, signal.SIGTERM])
    after = rng.uniform(0.0, 0.05)
    victim = rng.choice(scene.trainer.ranks)
    timer = threading.Timer(after, victim.signal, [how])
    timer.start()
    with contextlib.suppress(Died, Failed):
        while True:
            scene.trainer.step()
    timer.join()
    return f"{how.name} to the trainer after {1e3 * after:.0f} ms"


def trainer_clock(scene: Scene, rng: Random) -> str:
    seconds = rng.choice([-3650, -1, -0.01, 0.01, 1, 3650]) * DAY_S
    scene.trainer.call("jump", seconds)
    return f"the trainer's clock jumps by {seconds / DAY_S} days"


def trainer_disk_full(scene: Scene, rng: Random) -> str:
    scene.publish(large=rng.random() < 0.7, full=True)
    return "the trainer's disk is full"


def second(scene: Scene, rng: Random) -> str:
    """The first one must be notified, and its version must not count."""
    first = scene.trainer
    scene.trainer = scene.new_trainer()
    try:
        scene.trainer.open()
        _must_be_fenced(first)
    finally:
        first.kill()
    return "a second trainer takes over"


def _must_be_fenced(trainer: Trainers) -> None:
    try:
        published = trainer.step()
    except Failed as error:
        if error.kind not in ("FencedError", "PeerError"):
            raise NotSurvived(f"the fenced trainer says {error}") from None
    else:
        raise NotSurvived(f"two trainers own the run: version {published.version} was confirmed to the first")


def three(scene: Scene, rng: Random) -> str:
    """Three trainers start at the same instant; the bucket may confirm a version to at most one of them."""
    others = [scene.new_trainer(), scene.new_trainer()]
    trainers = [scene.trainer, *others]
    for other in others:
        other.send("open")
    opened = [_works(other.answers) for other in others]
    published = [trainer for trainer in trainers if _works(trainer.step)]
    if len(published) > 1:
        raise NotSurvived(f"{len(published)} trainers own the run")
    scene.trainer = published[0] if published else trainers[0]
    for trainer in trainers:
        if trainer is not scene.trainer:
            trainer.kill()
    return f"three trainers, {sum(opened)} of the two new ones opened the run"


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (Died, Failed):
        return False
    return True


def follower_operation(what: str, ops: tuple[str, ...], times: int = 1) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        kinds = ("process", "kept") if "kill" in what or "term" in what else ()
        member = scene.choose(rng, *kinds)
        nth = rng.randint(1, 5)
        count = rng.randint(1, times)
        scene.arm(member, Fault(what, nth, count, ops))
        return f"{what}, operation {nth} of {member.name}, {count} times"

    return strike


def follower_disk_change(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    nth = rng.randint(1, 12)
    member.actor.call("die_writing", nth, str(member.folder))
    scene.until_struck(lambda: not member.actor.alive, member)
    return f"kill -9 of {member.name} at disk change {nth}"


def follower_signalled(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    how = rng.choice([signal.SIGKILL, signal.SIGTERM])
    after = rng.uniform(0.0, 0.05)
    timer = threading.Timer(after, member.actor.signal, [how])
    timer.start()
    scene.publish()
    timer.join()
    return f"{how.name} to {member.name} after {1e3 * after:.0f} ms"


def follower_disk_full(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.actor.call("fill_disk", True)
    if member.kind == "process" and rng.random() < 0.7:
        member.heal()  # a whole version is laid out
    scene.publish(large=True)
    time.sleep(0.2)
    scene.check(member)
    member.actor.call("fill_disk", False)
    return f"the disk of {member.name} is full"


def follower_clock(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    seconds = rng.choice([-3650, -1, 1, 3650]) * DAY_S
    member.actor.call("jump", seconds)
    return f"the clock of {member.name} jumps by {seconds / DAY_S:.0f} days"


def memory(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    claim = member.claim()
    member.tainted = claim.version if claim else None
    member.actor.call("flip_memory")
    return f"a bit of the weights in {member.name} flips"


def commit(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    kind = rng.choice(["commit", "unexpected", "codec", "route"])
    member.actor.call("fail_commit", kind)
    return f"a commit of {member.name} fails with {kind}"


def vllm_dies(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process", "vllm")
    member.starts += 1
    member.actor.call("kill_vllm")
    return f"vLLM of {member.name} dies"


def anchor_on_disk(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process")
    if not member.actor.call("damage_anchor"):
        raise NotStruck
    member.heal()
    return f"the anchor that {member.name} keeps is damaged, and it is healed"


def rejoin(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process", "kept")
    member.actor.close()
    shutil.rmtree(member.folder, ignore_errors=True)
    member.start()
    return f"{member.name} joins on another machine"


def disk_while_down(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.killed()
    member.damage_disk(rng)
    return f"the disk of {member.name} is damaged while it is down"


_REQUESTS = ("HEAD .*/resolve/", "POST .*/batch", "POST .*/paths-info", "GET .*/xet-", "/cas/", "GET .*/tree")


def damaged(kind: str) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        how = rng.choice(DAMAGES)
        key = scene.vandal.call("damage", kind, how, rng.randrange(1 << 30))
        if key is None:
            raise NotStruck
        if rng.random() < 0.5:
            return f"{key} {how}, and {rejoin(scene, rng)}"
        return f"{key} {how}"

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
        hub = scene.place.hub
        match = rng.choice(_REQUESTS)
        times = rng.randint(1, 3)
        hub.fault(match, times=times, **how)
        scene.publish()
        return f"{match} {how}, {times} times"

    return strike


def away(scene: Scene, rng: Random) -> str:
    bucket = Path(scene.place.url.removeprefix("file://"))
    bucket.rename(aside := bucket.with_name("away"))
    time.sleep(rng.uniform(0.05, 0.3))
    aside.rename(bucket)
    return "the bucket's folder is away for a while"


_DEATHS = ("kill before", "kill within", "kill after", "term before", "term after")
ANYWHERE: dict[str, Strike] = {
    **{f"trainer {what}": trainer_operation(what) for what in _DEATHS},
    **{
        f"trainer opens, {what}": opening(what)
        for what in ("kill before", "kill after", "refuse", "stale", "hide")
    },
    "trainer 503": trainer_operation("refuse", times=4),
    "trainer answer lost": trainer_operation("lose answer", times=2),
    "trainer stall": trainer_operation("stall"),
    "trainer torn upload": trainer_operation("tear", times=2),
    "trainer flipped upload": trainer_operation("flip"),
    "trainer disk change": trainer_disk_change,
    "trainer signal": trainer_signalled,
    "trainer clock": trainer_clock,
    "trainer disk full": trainer_disk_full,
    "second trainer": second,
    "three trainers": three,
    **{f"object {kind.rstrip('/')}": damaged(kind) for kind in KINDS},
    "HEAD replayed": replayed,
    "run replaced": replaced,
    "gc": collected,
    **{
        f"follower {what}": follower_operation(what, FETCHES)
        for what in ("kill before", "kill after", "term after")
    },
    "follower 503": follower_operation("refuse", FETCHES + LOOKS, times=6),
    "follower torn download": follower_operation("tear", FETCHES, times=2),
    "follower flipped download": follower_operation("flip", FETCHES, times=2),
    "follower hidden object": follower_operation("hide", FETCHES + LOOKS, times=3),
    "follower stale answer": follower_operation("stale", LOOKS, times=6),
    "follower stall": follower_operation("stall", FETCHES),
    "follower disk change": follower_disk_change,
    "follower signal": follower_signalled,
    "follower disk full": follower_disk_full,
    "follower clock": follower_clock,
    "memory flips": memory,
    "commit fails": commit,
    "vLLM dies": vllm_dies,
    "kept anchor damaged": anchor_on_disk,
    "follower joins": rejoin,
    "disk damaged while down": disk_while_down,
}
ON_DISK: dict[str, Strike] = {**ANYWHERE, "bucket away": away}
ON_HUB: dict[str, Strike] = {
    **ANYWHERE,
    "Hub 429": hub(status=429, headers={"Retry-After": "1"}),
    "Hub 500": hub(status=500),
    "Hub 503": hub(status=503),
    "Hub hangs up": hub(drop=True),
    "Hub stalls": hub(delay=0.5),
    "Hub truncates": hub(truncate=10),
    "Hub flips": hub(flip=9),
}
_NOT_VLLM = ("follower ", "memory", "commit", "kept anchor", "disk damaged")
WITH_VLLM: dict[str, Strike] = {
    name: strike for name, strike in ON_DISK.items() if not name.startswith(_NOT_VLLM) and name != "vLLM dies"
}
