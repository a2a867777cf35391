"""The run as it was: the live view of earlier versions, so that one can scrub through time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from inference_space.dashboard.fold import Fold
from inference_space.dashboard.view import Progress
from shared.bucket import Bucket
from shared.protocol import ProtocolError
from shared.runlog import Event, RunLogReader, SyncEvent

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


Digests = Callable[[set[int]], dict[int, str]]


def replay(
    events: Sequence[Event], versions: Sequence[int], digests: Digests = lambda _: {}
) -> Iterator[tuple[int, Progress]]:
    """The run as it stood just before the version after each of `versions` came.

    `digests` looks up what was published for the versions that replicas say they are on.
    """
    fold, wanted = Fold(), sorted(versions)
    for event in events:
        while wanted and isinstance(event, SyncEvent) and event.version > wanted[0]:
            yield from _frame(fold, wanted.pop(0), digests)
        fold.add([event])
    for version in wanted:
        yield from _frame(fold, version, digests)


def _frame(fold: Fold, version: int, digests: Digests) -> Iterator[tuple[int, Progress]]:
    fold.digests |= digests(fold.served() - fold.digests.keys())
    progress = fold.progress()
    if progress is not None:
        yield version, progress


class Past:
    """Frames of a run, rendered once for all viewers: one reading of the log makes all that are missing."""

    def __init__(self, bucket: Bucket, render: Callable[[Progress], str]) -> None:
        self._bucket, self._render = bucket, render
        self._lock = threading.Lock()
        self._of: tuple[str, float] = ("", 0.0)
        self._frames: dict[int, str] = {}

    def at(self, run: str, created_at: float, version: int, newest: int) -> str:
        """The page of `run` at a moment; raises `ProtocolError` for a version that is none."""
        with self._lock:
            if (run, created_at) != self._of:
                self._of, self._frames = (run, created_at), {}
            if version not in self._frames and version in moments(newest):
                self._make(moments(newest)[:-1])
            if version not in self._frames:
                raise ProtocolError(f"version {version} is not one of the moments of run {run!r}")
            return self._frames[version]

    def _make(self, wanted: list[int]) -> None:
        kept = {version: self._frames[version] for version in wanted if version in self._frames}
        events = RunLogReader(self._bucket, self._of[0]).poll()
        missing = [version for version in wanted if version not in kept]
        self._frames = kept | {at: self._render(progress) for at, progress in replay(events, missing)}
