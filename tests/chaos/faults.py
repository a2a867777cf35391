"""Everything that can go wrong, by name: each lets one thing happen to a scene, and says what it was."""

from __future__ import annotations

import importlib.util

from tests.chaos import follower_faults as followers
from tests.chaos import store_faults as stores
from tests.chaos import trainer_faults as trainers
from tests.chaos.scene import Strike
from tests.chaos.vandal import KINDS

FETCHES, LOOKS = ("get", "fetch"), ("stat", "list", "get")
_DEATHS = ("kill before", "kill within", "kill after", "term before", "term after")
ANYWHERE: dict[str, Strike] = {
    **{f"trainer {what}": trainers.operation(what) for what in _DEATHS},
    **{
        f"trainer opens, {what}": trainers.opening(what)
        for what in ("kill before", "kill after", "refuse", "stale", "hide")
    },
    "trainer 503": trainers.operation("refuse", times=4),
    "trainer answer lost": trainers.operation("lose answer", times=2),
    "trainer stall": trainers.operation("stall"),
    "trainer torn upload": trainers.operation("tear", times=2),
    "trainer flipped upload": trainers.operation("flip"),
    "trainer disk change": trainers.disk_change,
    "trainer signal": trainers.signalled,
    "trainer clock": trainers.clock,
    "trainer disk full": trainers.disk_full,
    "second trainer": trainers.second,
    "three trainers": trainers.three,
    **{f"object {kind.rstrip('/')}": stores.damaged(kind) for kind in KINDS},
    "HEAD replayed": stores.replayed,
    "run replaced": stores.replaced,
    **{
        f"follower {what}": followers.operation(what, FETCHES)
        for what in ("kill before", "kill after", "term after")
    },
    "follower 503": followers.operation("refuse", FETCHES + LOOKS, times=6),
    "follower torn download": followers.operation("tear", FETCHES, times=2),
    "follower flipped download": followers.operation("flip", FETCHES, times=2),
    "follower hidden object": followers.operation("hide", FETCHES + LOOKS, times=3),
    "follower stale answer": followers.operation("stale", LOOKS, times=6),
    "follower stall": followers.operation("stall", FETCHES),
    "follower disk change": followers.disk_change,
    "follower signal": followers.signalled,
    "follower disk full": followers.disk_full,
    "follower clock": followers.clock,
    "memory flips": followers.memory,
    "commit fails": followers.commit,
    "vLLM dies": followers.vllm_dies,
    "kept anchor damaged": followers.anchor_on_disk,
    "follower joins": followers.rejoin,
    "disk damaged while down": followers.disk_while_down,
}
if importlib.util.find_spec("delta_weight_sync.pruning"):
    ANYWHERE["gc"] = stores.collected
ON_DISK: dict[str, Strike] = {**ANYWHERE, "bucket away": stores.away}
ON_HUB: dict[str, Strike] = {
    **ANYWHERE,
    "Hub 429": stores.hub(status=429, headers={"Retry-After": "1"}),
    "Hub 500": stores.hub(status=500),
    "Hub 503": stores.hub(status=503),
    "Hub hangs up": stores.hub(drop=True),
    "Hub stalls": stores.hub(delay=0.5),
    "Hub truncates": stores.hub(truncate=10),
    "Hub flips": stores.hub(flip=9),
}
_NOT_VLLM = ("follower ", "memory", "commit", "kept anchor", "disk damaged")
WITH_VLLM: dict[str, Strike] = {
    name: strike for name, strike in ON_DISK.items() if not name.startswith(_NOT_VLLM) and name != "vLLM dies"
}
