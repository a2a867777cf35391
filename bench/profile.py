"""Where encoding `small` spends its time: seconds of its parts, each without what it calls.

The parts are functions of the codec, timed from outside. `walk alone` is what is left when next to nothing
changed: passing the old weights once and sorting them into bands, which no coding of the changes can avoid.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from bench.change import Change
from bench.results import SCRATCH
from delta_weight_sync import codec
from delta_weight_sync.codec import Patch, bits, groups, positions

_PARTS: dict[str, tuple[Any, str]] = {
    "choose bands": (positions, "choose_limits"),
    "walk": (positions, "band_runs"),
    "walk and position bits": (positions, "band_walk"),
    "position and value bits": (bits, "encode"),
    "values": (groups, "encode"),
    "value bits": (groups.Reader, "read"),
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
    runs_ = [_profile(functools.partial(work, change)) for _ in range(_REPEATS)]
    best = min(runs_, key=lambda run: sum(run.values()))
    return {part: round(s, 4) for part, s in best.items()} | {"total": round(sum(best.values()), 4)}


def _encode(change: Change) -> bytes:
    return change.encode("small")


def _decode(change: Change) -> list[Patch]:
    delta = codec.Delta(SCRATCH / "profile.safetensors")
    return list(delta.patches(change.shapes, change.old.__getitem__))


def _first_only(patch: Patch) -> Patch:
    return replace(patch, index=patch.index[:1], ulps=patch.ulps[:1])


class _Clock:
    """Adds elapsed time to the part that runs: one part at a time, the innermost."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._running, self._since = [_REST], time.process_time()

    def _book(self) -> None:
        now = time.process_time()
        part = self._running[-1]
        self.totals[part] = self.totals.get(part, 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Time the block as `part`."""
        self._book()
        self._running.append(part)
        try:
            yield
        finally:
            self._book()
            self._running.pop()

    def stop(self) -> dict[str, float]:
        """Seconds by part."""
        self._book()
        return self.totals


def _profile(work: Callable[[], object]) -> dict[str, float]:
    with contextlib.ExitStack() as patches:
        clock = _Clock()
        for part, (owner, name) in _PARTS.items():
            timed = _timed(getattr(owner, name), part, clock)
            patches.enter_context(mock.patch.object(owner, name, timed))
        work()
        return clock.stop()


def _timed(function: Callable[..., Any], part: str, clock: _Clock) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with clock.inside(part):
            return function(*args, **kwargs)

    return wrapped
