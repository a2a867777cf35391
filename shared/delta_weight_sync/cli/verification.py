"""Rebuilds all versions of a run, with the memory and the disk of a few of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.reader import RunReader, require_digest
from delta_weight_sync.records import DeltaRef, FileRef, Manifest
from delta_weight_sync.scratch import Scratch


class Versions:
    """The versions that `verify` checks. All manifests together could fill the memory, so all but the newest
    and the oldest are read a second time when they are needed.

    Attributes:
        newest: The manifest of the newest version.
        oldest: The manifest of the oldest version that was not deleted.
        refs: References to the manifests of all versions but the newest, from new to old.
        anchors: Version of an anchor -> position in `refs` of the newest manifest that names it; -1 for the
            newest manifest.
        jumps: Base and version of each jump to check -> its parts by key.
    """

    def __init__(self, reader: RunReader) -> None:
        self._reader, self.refs = reader, list[FileRef]()
        self._positions: dict[int, int] = {}  # version -> position in `refs`
        self.anchors: dict[int, int] = {}
        self.jumps: dict[tuple[int, int], dict[str, DeltaRef]] = {}
        newer: Manifest | None = None
        for manifest in reader.versions():
            if newer is None:
                self.newest = manifest
                self._add_jumps(manifest.jumps)
            elif newer.parent:
                self.refs.append(newer.parent)
            position = len(self.refs) - 1
            self._positions.setdefault(manifest.version, position)
            self.anchors.setdefault(manifest.anchor.version, position)
            self._add_jumps(manifest.recipe().deltas)
            newer = manifest
        assert newer is not None, "the run has a version"
        self.oldest = newer

    def _add_jumps(self, deltas: Iterable[DeltaRef]) -> None:
        for part in deltas:
            if part.version - part.base > 1:
                self.jumps.setdefault((part.base, part.version), {}).setdefault(part.key, part)

    def at(self, position: int) -> Manifest:
        """The manifest at a position in `refs`, or the newest manifest for -1."""
        return self.newest if position < 0 else self._reader.read(Manifest, self.refs[position])

    def target(self, base: int, version: int) -> Manifest:
        """The manifest of the version to which a jump leads. Raises `ProtocolError` if the run lacks it."""
        if (position := self._positions.get(version)) is None:
            jump = f"a manifest names a jump from version {base} to {version}, which the run does not have"
            raise ProtocolError(f"{jump}; the run is damaged: resume from an earlier version")
        return self.at(position)

    def __iter__(self) -> Iterator[Manifest]:
        """The manifests, from old to new."""
        return map(self.at, range(len(self.refs) - 1, -2, -1))


def verified(reader: RunReader, found: Versions, folder: Path) -> Iterator[Manifest]:
    """Verify the versions one after the other, and yield the manifest of each.

    The oldest version is built as a joining replica builds it. Each later version is built from the version
    before it and its delta. The newest version is also built as a joining replica builds it. An anchor (a
    whole checkpoint) is checked together with its version. A jump (a delta over several versions) is checked
    together with the version at which the jump begins, if a joining replica would use the jump, or if the
    newest manifest names the jump. The disk holds at most two checkpoints at the same time."""
    state: dict[str, Bits] = {}
    for manifest in found:
        if state and manifest.delta:
            reader.apply(state, manifest.delta, folder)
            require_digest(state, manifest)
        else:
            state.clear()  # unmaps the files that the checkout replaces, which frees their space
            state = reader.checkout(manifest, folder)
        if (naming := found.anchors.get(manifest.version)) is not None:
            anchor = found.at(naming).anchor
            with Scratch() as other:
                reader.checkout(manifest.model_copy(update={"anchor": anchor}), other)
        for (base, version), parts in found.jumps.items():
            if base == manifest.version:
                target = found.target(base, version)
                copy = {name: bits.copy() for name, bits in state.items()}
                reader.apply(copy, parts.values(), folder)
                require_digest(copy, target)
        yield manifest
    state.clear()
    reader.checkout(found.newest, folder)
