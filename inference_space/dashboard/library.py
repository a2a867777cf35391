"""What viewers ask of the bucket beyond the live page: listings, deltas, proofs; read once for all."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from delta_weight_sync.heads import manifests_of
from delta_weight_sync.history import RunReader, deleted
from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import Bucket, Listing, ObjectInfo, ObjectMissing
from inference_space.dashboard.anatomy import Anatomy, open_delta
from inference_space.dashboard.once import Once
from inference_space.dashboard.rations import RationedError

LIST_EVERY_S = 5.0
MAX_REBUILD = 1_000_000_000  # bytes of a version's files that a dashboard rebuilds for a proof
MAX_DOWNLOAD = 256_000_000  # bytes of an object that goes through the dashboard
_MANIFESTS, _PROOFS = 256, 4096  # that are kept
_TENSORS = 200_000  # listed by all opened deltas that are kept: about 300 bytes each
_DISK = 1_000_000_000  # bytes of objects that are kept to be downloaded again


class Library:
    """Reads of one run on demand. One at a time: fifty viewers of a delta cost one download."""

    def __init__(
        self, bucket: Bucket, run: Callable[[], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`run` names the run that is shown, None before there is one."""
        self.bucket, self._run, self._clock = bucket, run, clock
        self._lock, self._linking = threading.Lock(), threading.Lock()
        self._listed: tuple[float, str, Listing] = (0.0, "", [])
        self._manifests = Once(self._read, _MANIFESTS)
        self._deltas = Once(self._open, _TENSORS, lambda delta: len(delta.tensors))
        self._proofs = Once(self._rebuild, _PROOFS)
        self._folder = tempfile.mkdtemp(prefix="delta-weight-sync-objects-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._objects = Once(self._download, _DISK, lambda path: path.stat().st_size, Path.unlink)

    @property
    def run(self) -> str:
        """The run's name; raises `ProtocolError` before there is one."""
        if (name := self._run()) is None:
            raise ProtocolError(f"{self.bucket.url} holds no run yet")
        return name

    def objects(self) -> Listing:
        """All objects of the run, at most `LIST_EVERY_S` seconds old, or older while no more may be read."""
        with self._lock:
            at, run, listing = self._listed
            if run == self.run and self._clock() - at <= LIST_EVERY_S:
                return listing
            try:
                self._listed = self._clock(), self.run, self.bucket.list(Keys(self.run).folder)
            except RationedError:
                if run != self.run:
                    raise
            return self._listed[2]

    def delta(self, version: int) -> tuple[Manifest, Anatomy]:
        """The manifest of a version and its delta, opened."""
        manifest = self._manifest(version)
        return manifest, self._deltas(manifest)

    def verify(self, version: int) -> str:
        """Rebuild a version from the bucket and compare digests; says in words that they are equal.

        Raises `ProtocolError` or `CodecError` where they are not, or where the model is too large for it.
        """
        return self._proofs(self._manifest(version))

    def digests(self, versions: set[int]) -> dict[int, str]:
        """The published digests of versions, of those that the run still has."""
        there = versions & manifests_of(self.objects()).keys()
        return {version: self._manifest(version).digest for version in there}

    def fetch(self, key: str, folder: Path) -> Path:
        """Download an object of the run to `folder`; anchors and other runs' objects are refused."""
        found = next((info for info in self.objects() if info.key == key), None)
        if found is None or "/anchors/" in key:
            raise ObjectMissing(f"{key} is not an object of run {self.run!r} that can be downloaded here")
        if found.size > MAX_DOWNLOAD:
            raise ProtocolError(f"{key} is too large to be sent from here: fetch it from {self.bucket.url}")
        path = folder / key.rsplit("/", 1)[-1]
        with self._linking:  # or what was just downloaded may make room for another
            os.link(self._objects(found), path)
        return path

    def _manifest(self, version: int) -> Manifest:
        manifests = manifests_of(self.objects())
        info, oldest = manifests.get(version), min(manifests, default=0)
        if info is None and 0 <= version < oldest:
            raise deleted(f"run {self.run!r} in {self.bucket.url}", version, oldest)
        if info is None:
            raise ProtocolError(f"run {self.run!r} has no version {version} in {self.bucket.url}")
        return self._manifests(info)

    def _read(self, info: ObjectInfo) -> Manifest:
        return RunReader(self.bucket, self.run).unpinned(info.key)

    def _download(self, info: ObjectInfo) -> Path:
        path = Path(self._folder, uuid4().hex)
        self.bucket.fetch(info.key, path, info.size)
        return path

    def _open(self, manifest: Manifest) -> Anatomy:
        if not manifest.deltas:
            raise ProtocolError(f"v{manifest.version} is an anchor: every weight is new, there is no delta")
        with tempfile.TemporaryDirectory() as folder:
            return open_delta(RunReader(self.bucket, self.run).fetch(manifest.deltas[-1], Path(folder)))

    def _rebuild(self, manifest: Manifest) -> str:
        if manifest.way().size > MAX_REBUILD:  # what it says of the model's size may be anything
            raise ProtocolError(
                f"this model is too large to be rebuilt here: delta-weight-sync verify {self.bucket.url}"
            )
        with tempfile.TemporaryDirectory() as folder:
            RunReader(self.bucket, self.run).checkout(manifest, Path(folder))
        deltas = len(manifest.way().deltas)
        return (
            f"v{manifest.version} was rebuilt from anchor v{manifest.anchor.version} and {deltas} deltas: "
            f"all {manifest.total} weights give the published digest {manifest.digest}"
        )
