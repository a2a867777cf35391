"""What can happen to a follower."""

from __future__ import annotations

import signal
import threading
import time
from random import Random

from tests.chaos.faulty import Fault
from tests.chaos.scene import DAY_S, NotStruck, Scene, Strike


def operation(what: str, ops: tuple[str, ...], times: int = 1) -> Strike:
    def strike(scene: Scene, rng: Random) -> str:
        kinds = ("process", "kept") if "kill" in what or "term" in what else ()
        member, nth, count = scene.choose(rng, *kinds), rng.randint(1, 5), rng.randint(1, times)
        scene.arm(member, Fault(what, nth, count, ops))
        return f"{what}, operation {nth} of {member.name}, {count} times"

    return strike


def disk_change(scene: Scene, rng: Random) -> str:
    member, nth = scene.choose(rng, "process", "kept"), rng.randint(1, 12)
    member.actor.call("die_writing", nth, (str(member.folder),))
    rejoin = (lambda: None) if member.kind == "kept" else (lambda: member.actor.call("heal"))
    scene.until_struck(lambda: not member.actor.alive, rejoin)
    return f"kill -9 of {member.name} at disk change {nth}"


def signalled(scene: Scene, rng: Random) -> str:
    member, how = scene.choose(rng, "process", "kept"), rng.choice([signal.SIGKILL, signal.SIGTERM])
    after = rng.uniform(0.0, 0.05)
    timer = threading.Timer(after, member.actor.signal, [how])
    timer.start()
    scene.publish()
    timer.join()
    return f"{how.name} to {member.name} after {1e3 * after:.0f} ms"


def disk_full(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.actor.call("fill_disk", True)
    if member.kind == "process" and rng.random() < 0.7:
        member.actor.call("heal")  # a whole version is laid out
    scene.publish(large=True)
    time.sleep(0.2)
    scene.check(member)
    member.actor.call("fill_disk", False)
    return f"the disk of {member.name} is full"


def clock(scene: Scene, rng: Random) -> str:
    member, seconds = scene.choose(rng, "process", "kept"), rng.choice([-3650, -1, 1, 3650]) * DAY_S
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
    kind = rng.choice(["StepCommitError", "OutOfMemoryError", "CodecError", "RouteError"])
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
    member.actor.call("heal")
    return f"the anchor that {member.name} keeps is damaged, and it is healed"


def rejoin(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "local", "process", "kept")
    member.end()
    member.lose_disk()
    member.start()
    return f"{member.name} joins on another machine"


def disk_while_down(scene: Scene, rng: Random) -> str:
    member = scene.choose(rng, "process", "kept")
    member.end(signal.SIGKILL)
    member.damage_disk(rng)
    return f"the disk of {member.name} is damaged while it is down"
