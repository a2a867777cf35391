"""Which files build a version with the fewest bytes, and which of them a manifest names."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from delta_weight_sync.records.files import AnchorRef, DeltaRef, FileRef
from delta_weight_sync.records.limits import WINDOW


class Recipe(NamedTuple):
    """The files that build a version: an anchor (None to start at your version), then deltas and jumps."""

    anchor: AnchorRef | None
    deltas: tuple[DeltaRef, ...]

    @property
    def files(self) -> tuple[FileRef, ...]:
        """All files of the recipe."""
        return (*(self.anchor.files if self.anchor else ()), *self.deltas)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def cheapest_recipe(
    anchor: AnchorRef | None, deltas: Iterable[DeltaRef], version: int, held: int | None
) -> Recipe | None:
    """The recipe with the fewest bytes; on a tie, with the fewest files. None if nothing leads to `version`.

    A recipe starts at `anchor`, or at `held`, a version that you already have. It has all parts of a delta or
    none. One pass over deltas and jumps, sorted by base, is enough, because each leads to a later version.
    """
    links: dict[tuple[int, int], list[DeltaRef]] = {}
    for delta in deltas:
        links.setdefault((delta.base, delta.version), []).append(delta)
    # version -> bytes, number of files, anchor (if any), and parts of the last delta (none at the start)
    reached: dict[int, tuple[int, int, AnchorRef | None, Sequence[DeltaRef]]] = {}
    if anchor:
        reached[anchor.version] = sum(file.size for file in anchor.files), 1, anchor, ()
    if held is not None and held <= version:
        reached[held] = 0, 0, None, ()
    for (base, end), parts in sorted(links.items(), key=lambda link: link[0][0]):
        if base in reached:
            size, files, start, _ = reached[base]
            cost = (size + sum(part.size for part in parts), files + len(parts))
            there = reached.get(end)
            if there is None or cost < there[:2]:
                reached[end] = *cost, start, parts
    if version not in reached:
        return None
    way: list[Sequence[DeltaRef]] = []  # the chosen deltas, from the last to the first
    at = version
    while leading := reached[at][3]:
        way.append(leading)
        at = leading[0].base
    return Recipe(reached[version][2], tuple(chain.from_iterable(reversed(way))))


def links_for(
    anchor: AnchorRef, deltas: tuple[DeltaRef, ...], jumps: tuple[DeltaRef, ...], version: int
) -> tuple[tuple[DeltaRef, ...], tuple[DeltaRef, ...]]:
    """Choose the deltas (without a gap) and the jumps that the manifest of `version` names.

    A manifest needs the cheapest recipe from the anchor. For replicas that are a little behind, it also needs
    the deltas of the last `WINDOW` versions and the jumps that such replicas can use.
    """
    recipe = cheapest_recipe(anchor, (*deltas, *jumps), version, None)
    needed = {delta.key for delta in recipe.deltas} if recipe else set()
    first = max(0, min([version - WINDOW + 1, *(d.version for d in deltas if d.key in needed)]))
    kept = tuple(delta for delta in deltas if delta.version >= first)
    return kept, tuple(jump for jump in jumps if jump.base >= first - 1 or jump.key in needed)
