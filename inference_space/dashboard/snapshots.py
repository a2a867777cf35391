"""Snapshots of a run at its earlier versions, so that one can look back with the slider."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.runlog import Event, SyncEvent
from inference_space.dashboard.run_state import RunState
from inference_space.dashboard.view import Progress

FRAMES = 60  # at most so many moments of a run


def moments(newest: int) -> list[int]:
    """The versions at which a run can be looked at: evenly spaced, and the newest."""
    step = stride(newest)
    return sorted({*range(0, newest + 1, step), newest})


def stride(newest: int) -> int:
    """Versions from one moment to the next; it doubles, so that moments stay moments as a run goes on."""
    step = 1
    while newest / step > FRAMES - 1:
        step *= 2
    return step


Digests = Callable[[set[int]], dict[int, str]]  # the published digests of versions


class Snapshots:
    """The run at each of its moments, kept as its events come in, so that looking back reads nothing anew."""

    def __init__(self) -> None:
        self._frames: dict[int, Progress] = {}

    def add(self, state: RunState, events: Iterable[Event]) -> None:
        """Add events to `state`, and keep how the run stood when the version after each moment came."""
        for event in events:
            if isinstance(event, SyncEvent) and state.version is not None:
                self._keep(state, state.version, event.version)
            state.add([event])

    def at(self, version: int, digests: Digests) -> Progress:
        """The run at a moment before its newest; raises `ProtocolError` for a version that is none."""
        found = self._frames.get(version)
        if found is None:
            raise ProtocolError(f"version {version} is not one of the moments at which the run was kept")
        unknown = {r.version for r in found.replicas if r.digest_ok is None and r.version is not None}
        if unknown:
            self._frames[version] = found = _compared(found, digests(unknown))
        return found

    def _keep(self, state: RunState, version: int, newest: int) -> None:
        step = stride(newest)
        if kept := range(-(-version // step) * step, newest, step):
            progress = state.progress()
            assert progress is not None
            self._frames |= dict.fromkeys(kept, progress)
        if len(self._frames) > FRAMES:
            self._frames = {at: frame for at, frame in self._frames.items() if at % step == 0}


def _compared(run: Progress, published: dict[int, str]) -> Progress:
    """With what is known by now of the digests of the versions that replicas were on."""
    replicas = (
        replace(r, digest_ok=r.digest == published[r.version])
        if r.digest is not None and r.version in published
        else r
        for r in run.replicas
    )
    return replace(run, replicas=tuple(replicas))
