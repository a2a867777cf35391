"""The versions of a run, one after the other, each as the change that it made."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_weight_sync.codec import Bits, Delta, Patch, apply
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader, require_digest
from delta_weight_sync.protocol import Manifest


class NoDeltaError(DeltaWeightSyncError):
    """Nothing tells how a version differs from the one before."""


@dataclass(frozen=True)
class Step:
    """One version: what it changed, and the bits of every tensor before."""

    manifest: Manifest
    before: Mapping[str, Bits]
    patches: Sequence[Patch]


def steps(reader: RunReader, manifests: Sequence[Manifest], folder: Path) -> Iterator[Step]:
    """Each of a run's `manifests`, oldest first, that a delta leads to; `folder` is scratch space.

    Every version is proven by its digest. `before` is changed in place: use it before asking for the next
    step. Raises `BucketError`, `CodecError` and `ProtocolError` of the run.
    """
    state: dict[str, Bits] = {}
    for manifest in manifests:
        if not state or not manifest.deltas:
            state = reader.checkout(manifest, folder)
            continue
        shapes = {name: bits.shape for name, bits in state.items()}
        path = reader.fetch(manifest.deltas[-1], folder)
        patches = list(Delta(path).patches(shapes, state.__getitem__))
        path.unlink()
        yield Step(manifest, state, patches)
        for patch in patches:
            apply(patch, state[patch.name])
        require_digest(state, manifest)


def patches_of(reader: RunReader, manifest: Manifest, folder: Path) -> Iterator[Patch]:
    """What one version changed; the version before it is only fetched where the delta was coded against it.

    Raises `NoDeltaError` for a version that was published whole.
    """
    if not manifest.deltas:
        raise NoDeltaError(
            f"version {manifest.version} was published whole: no delta says what changed in it"
        )
    delta = Delta(reader.fetch(manifest.deltas[-1], folder))
    before = functools.cache(lambda: reader.checkout(reader.find(manifest.version - 1), folder / "before"))
    return delta.patches({t.name: t.shape for t in delta.tensors}, lambda name: before()[name])
