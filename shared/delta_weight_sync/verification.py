"""Rebuilds all versions of a run, with the memory and the disk of a few of them."""

from array import array
from collections.abc import Iterable, Iterator

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.reader import RunReader, require_digest
from delta_weight_sync.records import DeltaRef, FileRef, Manifest, parse
from delta_weight_sync.scratch import Scratch


class Versions:
    """The versions that `verify` checks. All manifests together could fill the memory, so all but the newest
    are read again when they are needed.

    Attributes:
        newest: The manifest of the newest version.
        oldest: The manifest of the oldest version that was not deleted.
        anchors: Version of an anchor -> position of the newest manifest that names it.
        jumps: Base of each jump to check -> the versions to which jumps lead from there, and for each of them
            the position of a manifest that names the jump.
    """

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        # References to the manifests of all versions but the newest, from new to old, as JSON in one buffer.
        # (Among the objects of manifests, which come and go, small objects that stay would keep memory from
        # being reused.) A position is a number in this order; -1 is the newest manifest.
        self._refs = bytearray()
        self._ends = array("Q", [0])  # where each reference ends; that of position i begins at index i
        self.anchors: dict[int, int] = {}
        self.jumps: dict[int, dict[int, int]] = {}
        newer: Manifest | None = None
        for manifest in reader.versions():
            if newer is None:
                self.newest = manifest
                self._add_jumps(manifest.jumps, -1)
            elif newer.parent:
                self._refs += newer.parent.to_bytes()
                self._ends.append(len(self._refs))
            position = len(self._ends) - 2
            self.anchors.setdefault(manifest.anchor.version, position)
            self._add_jumps(manifest.recipe().deltas, position)
            newer = manifest
        assert newer is not None, "the run has a version"
        self.oldest = newer

    def _add_jumps(self, deltas: Iterable[DeltaRef], position: int) -> None:
        for part in deltas:
            if part.version - part.base > 1:
                self.jumps.setdefault(part.base, {}).setdefault(part.version, position)

    def at(self, position: int) -> Manifest:
        """The manifest at a position."""
        if position < 0:
            return self.newest
        ref = self._refs[self._ends[position] : self._ends[position + 1]]
        return self._reader.read(Manifest, parse(FileRef, bytes(ref), "a reference"))

    def jumps_from(self, base: int) -> Iterator[tuple[Manifest, list[DeltaRef]]]:
        """The jumps from a version: the manifest to which each leads, and its parts."""
        for version, position in self.jumps.get(base, {}).items():
            named = self.at(position).jumps
            parts = [part for part in named if (part.base, part.version) == (base, version)]
            yield self._target(base, version), parts

    def _target(self, base: int, version: int) -> Manifest:
        """The manifest of the version to which a jump leads. Raises `ProtocolError` if the run lacks it."""
        position = self.newest.version - version - 1
        target = self.at(position) if -1 <= position < len(self) - 1 else None
        if target is None or target.version != version:
            jump = f"a manifest names a jump from version {base} to {version}, which the run does not have"
            raise ProtocolError(f"{jump}; the run is damaged: resume from an earlier version")
        return target

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Manifest]:
        """The manifests, from old to new."""
        return map(self.at, range(len(self) - 2, -2, -1))


def verified(reader: RunReader) -> Iterator[Manifest]:
    """Rebuild every version of a run, oldest first, and yield the manifest of each.

    The oldest version is built as a joining replica builds it. Each later version is built from the version
    before it and its delta. The newest version is also built as a joining replica builds it. An anchor (a
    whole checkpoint) is checked together with its version. A jump (a delta over several versions) is checked
    together with the version at which the jump begins, if a joining replica would use the jump, or if the
    newest manifest names the jump. The disk holds at most two checkpoints at the same time.
    """
    reader.require_intact()
    reader.manifest()  # raises an error if there is no version
    found = Versions(reader)
    _require_no_gap_below(reader, found.oldest)
    state: dict[str, Bits] = {}
    with Scratch() as folder:
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
            for target, parts in found.jumps_from(manifest.version):
                copy = {name: bits.copy() for name, bits in state.items()}
                reader.apply(copy, parts, folder)
                require_digest(copy, target)
            yield manifest
        state.clear()
        reader.checkout(found.newest, folder)


def _require_no_gap_below(reader: RunReader, oldest: Manifest) -> None:
    """Raise `ProtocolError` if there are versions below the oldest that can be reached: one is lost."""
    if oldest.parent is None:
        return  # version 0; a listing of the run would take much memory
    infos = {info.key: info for info in reader.bucket.list(reader.keys.folder)}
    if below := reader.below_gap(oldest, oldest.version, infos):
        gap = f"the manifest of version {oldest.version - 1} is missing, but version {below.version} is there"
        why = "the manifest was lost, or a `gc` was interrupted"
        raise ProtocolError(f"{gap}: {why}; use versions from {oldest.version} on, or run `gc` to the end")
