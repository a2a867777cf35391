"""Where encoding `small` spends its time: seconds of its parts, each without what it calls.

The parts are functions of the codec, timed from outside on one thread. `walk alone` is what is left when next
to nothing changed: passing the old weights once and sorting them into bands, which no coding of the changes
can avoid.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from bench.change import Change
from bench.results import SCRATCH
from delta_weight_sync import codec
from delta_weight_sync.codec import Patch, bits, groups, positions

_PARTS: dict[tuple[ModuleType, str], str] = {  # functions of modules -> what they do
    (positions, "choose_limits"): "choose bands",
    (positions, "band_runs"): "walk",
    (positions, "band_walk"): "walk and position bits",
    (bits, "encode_runs"): "position and value bits",
    (groups, "_encode_values"): "values",
    (groups, "_enlarge"): "value bits",
}
_REST = "gathering and the rest"
_REPEATS = 3


def measure(change: Change) -> dict[str, Any]:
    """Best seconds of each part of encode and decode, and GB/s of the walk alone."""
    sparse = replace(change, patches=[_first_only(patch) for patch in change.patches if patch.index.size])
    return {
        "encode": _best(change, _encode),
        "decode": _best(change, _decode),
        "walk_alone": {
            "encode_gb_s": round(change.model_bytes / _best(sparse, _encode)["total"] / 1e9, 3),
            "decode_gb_s": round(change.model_bytes / _best(sparse, _decode)["total"] / 1e9, 3),
        },
    }


def _best(change: Change, work: Callable[[Change], object]) -> dict[str, float]:
    (SCRATCH / "profile.safetensors").write_bytes(change.encode("small"))
    best = min((_profile(work, change) for _ in range(_REPEATS)), key=lambda seconds: sum(seconds.values()))
    return {part: round(s, 4) for part, s in best.items()} | {"total": round(sum(best.values()), 4)}


def _encode(change: Change) -> bytes:
    return change.encode("small")


def _decode(change: Change) -> list[Patch]:
    delta = codec.Delta(SCRATCH / "profile.safetensors")
    return list(delta.patches(change.shapes, change.old.__getitem__))


def _first_only(patch: Patch) -> Patch:
    return replace(patch, index=patch.index[:1], ulps=patch.ulps[:1])


def _profile(work: Callable[[Change], object], change: Change) -> dict[str, float]:
    """Seconds by part; while a part runs, the part that called it does not."""
    seconds = defaultdict[str, float](float)
    running, since = [_REST], time.process_time()

    def book() -> None:
        nonlocal since
        now = time.process_time()
        seconds[running[-1]] += now - since
        since = now

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            book()
            running.append(part)
            result = function(*arguments)
            book()
            running.pop()
            return result

        return wrapped

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("delta_weight_sync.util.THREADS", 1))
        for (module, name), part in _PARTS.items():
            patches.enter_context(mock.patch.object(module, name, timed(getattr(module, name), part)))
        work(change)
        book()
    return seconds
