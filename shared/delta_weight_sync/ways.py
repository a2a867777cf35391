"""The cheapest way to a version, by bytes: over an anchor, deltas of one version and jumps over several.

All edges lead forward, so that one walk over them in the order of their bases finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from delta_weight_sync.refs import AnchorRef, DeltaRef, FileRef

STRIDES: Final = (8, 64)  # versions that a jump spans
ANCHOR_PAYS: Final = 0.5  # of the model behind an anchor: so a join costs at most 1.5 times the newest one
MAX_FILES: Final = 128  # behind an anchor, however small they are
WINDOW: Final = 64  # versions back from the newest one whose deltas a manifest lists in any case


class Way(NamedTuple):
    """What to fetch, in this order: the anchor, unless one begins at a version that one has; then deltas."""

    anchor: AnchorRef | None
    deltas: tuple[DeltaRef, ...]

    @property
    def files(self) -> tuple[FileRef, ...]:
        """All of it."""
        return (*(self.anchor.files if self.anchor else ()), *self.deltas)

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return sum(file.size for file in self.files)


def cheapest(
    anchor: AnchorRef | None, deltas: Iterable[DeltaRef], version: int, held: int | None
) -> Way | None:
    """From `anchor`, or from the version that is `held` if there is one, to `version`.

    None where no way leads there. Of two ways of as many bytes it is the one of fewer files.
    """
    reached: dict[int, _Reached] = {}
    if anchor:
        reached[anchor.version] = _Reached(sum(file.size for file in anchor.files), 1, Way(anchor, ()))
    if held is not None and held <= version:
        reached[held] = _Reached(0, 0, Way(None, ()))
    for delta in sorted(deltas, key=lambda delta: delta.base):
        if before := reached.get(delta.base):
            after, there = before.then(delta), reached.get(delta.version)
            if there is None or after[:2] < there[:2]:
                reached[delta.version] = after
    return reached[version].way if version in reached else None


class _Reached(NamedTuple):
    """A version, by the cheapest way so far."""

    size: int
    files: int
    way: Way

    def then(self, delta: DeltaRef) -> _Reached:
        way = Way(self.way.anchor, (*self.way.deltas, delta))
        return _Reached(self.size + delta.size, self.files + 1, way)


class Listed(NamedTuple):
    """What a manifest names beside its anchor."""

    deltas: tuple[DeltaRef, ...]  # of one version each, contiguous
    jumps: tuple[DeltaRef, ...]


def listed(anchor: AnchorRef, deltas: Iterable[DeltaRef], jumps: Iterable[DeltaRef], version: int) -> Listed:
    """Of all that is known what the manifest of `version` has to name.

    That is the cheapest way from the anchor, the deltas of the last `WINDOW` versions for replicas that are a
    little behind, whatever the anchor is, and the jumps that such replicas can take. Where jumps are made,
    it does not grow with the distance to the anchor but by one jump in 64 versions.
    """
    deltas, jumps = tuple(deltas), tuple(jumps)
    way = cheapest(anchor, (*deltas, *jumps), version, None)
    needed = {delta.key for delta in way.deltas} if way else set()
    first = min((d.version for d in deltas if d.key in needed), default=version)
    first = max(0, min(first, version - WINDOW + 1))
    return Listed(
        tuple(d for d in deltas if d.version >= first),
        tuple(j for j in jumps if j.base >= first - 1 or j.key in needed),
    )
