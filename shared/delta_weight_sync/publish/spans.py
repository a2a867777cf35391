"""Spans: the changes that lead from one version to a later one, in memory or in a small file.

Spans that follow one another merge exactly, tensor by tensor. They also lead back: without the spans after a
version, newer bits of a tensor are the bits of that version.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import Shapes
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.digest import change_digest
from delta_weight_sync.errors import CodecError

_GROUP = 1 << 22  # elements of a group of a file; eight files are read at a time


class Span:
    """What changed in this rank's tensors from version `base` to `version`, and their digest at `version`."""

    def __init__(
        self,
        base: int,
        version: int,
        digest: str,
        changes: Iterable[Patch] | Path | Exception,
        shapes: Shapes,
    ) -> None:
        """`changes`: the patches, or a file from `write`, or why that file could not be written. `shapes`
        must have the changed tensors."""
        self.base = base
        self.version = version
        self.digest = digest
        self._source = changes
        self._shapes = shapes
        self._patches: dict[str, Patch] = {}  # all patches; of a file, those of one group
        if not isinstance(changes, Path | Exception):
            self._patches = {patch.name: patch for patch in changes}
        self.nbytes = sum(p.index.nbytes + p.ulps.nbytes for p in self._patches.values())  # in memory
        self._delta: codec.Delta | None = None
        self._groups: dict[str, int] = {}  # each tensor of the file -> its group in the file

    def patch(self, name: str) -> Patch | None:
        """The changes of a tensor; None if there are none. Only one thread may read a span in a file."""
        if isinstance(self._source, Exception):
            raise self._source
        if isinstance(self._source, Path) and not self._delta:
            self._delta = codec.Delta(self._source)
            self._groups = {row.name: row.group for row in self._delta.tensors}
        if self._delta and name in self._groups and name not in self._patches:
            one = self._groups[name], len(self._delta.groups)
            groups = self._delta.decode(self._shapes, _no_bits, one)
            self._patches = {patch.name: patch for group in groups for patch in group.patches(self._shapes)}
        return self._patches.get(name)

    def rest(self) -> None:
        """Free the memory that reading the file took."""
        if isinstance(self._source, Path):
            self._patches = {}
            self._groups = {}
            self._delta = None

    def delete(self) -> None:
        """Delete the file, if any."""
        if isinstance(self._source, Path):
            self._source.unlink(missing_ok=True)


def write(path: Path, delta: bytes, patches: Callable[[], Iterable[Patch]]) -> None:
    """Write the file of a span, whose delta and patches these are. Reading the file needs no older bits."""
    _store(path, delta)
    found = codec.Delta(path)
    if found.reads_old:
        write_patches(path, patches(), found.base, found.version)


def write_patches(path: Path, patches: Iterable[Patch], base: int, version: int) -> None:
    """Write the file of a span whose delta is not at hand."""
    _store(path, codec.encode(patches, None, base=base, version=version, group_elements=_GROUP))


def _store(path: Path, data: bytes) -> None:
    """Write a file, or leave none: on a full disk, a part of it would only take room."""
    try:
        path.write_bytes(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def merged(spans: Sequence[Span], shapes: Shapes) -> Iterator[Patch]:
    """Yield the patches of all spans as one patch per tensor, in the order of `shapes`.

    Meanwhile, memory holds one decoded group of each file.
    """
    for name in shapes:
        found: list[Patch] = []
        for patch in filter(None, (span.patch(name) for span in spans)):
            found = codec.merge(found, [patch])
        yield from found
    for span in spans:
        span.rest()


def undo(bits: Bits, patches: Iterable[Patch | None]) -> None:
    """Undo patches (newest first; None stands for no change) in a tensor's bits, in place."""
    for patch in filter(None, patches):
        codec.apply(codec.inverse(patch), bits)


def digest_change(patch: Patch, bits: Bits) -> int:
    """How a patch, after which a tensor has these `bits`, has changed the digest."""
    new = bits.reshape(-1)[patch.index]
    return change_digest(patch.name, patch.index, new - patch.ulps, new)


def _no_bits(name: str) -> Bits:
    raise CodecError(f"{name}: the file of a span must not need older bits")
