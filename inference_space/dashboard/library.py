"""What viewers ask of the bucket beyond the live page: listings, deltas, proofs; read once for all."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from delta_weight_sync.heads import manifests_of
from delta_weight_sync.history import RunReader, deleted
from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import Bucket, Listing, ObjectInfo, ObjectMissing
from inference_space.dashboard.anatomy import Anatomy, open_delta

LIST_EVERY_S = 2.0
KEPT = 64  # answers
MAX_REBUILD = 1_000_000_000  # bytes of weights that a dashboard rebuilds for a proof
MAX_DOWNLOAD = 256_000_000  # bytes of an object that goes through the dashboard


Answer = TypeVar("Answer")


class _Once(Generic[Answer]):
    """Answers about manifests that are worked out once, one at a time, and kept for a while."""

    def __init__(self, work: Callable[[Manifest], Answer]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._kept: OrderedDict[str, Answer] = OrderedDict()

    def __call__(self, manifest: Manifest) -> Answer:
        with self._lock:
            key = hashlib.sha256(manifest.to_bytes()).hexdigest()
            if key not in self._kept:
                self._kept[key] = self._work(manifest)
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]


class Library:
    """Reads of one run on demand. One at a time: fifty viewers of a delta cost one download."""

    def __init__(
        self, bucket: Bucket, run: Callable[[], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`run` names the run that is shown, None before there is one."""
        self.bucket, self._run, self._clock = bucket, run, clock
        self._lock = threading.Lock()
        self._listed: tuple[float, str, Listing] = (0.0, "", [])
        self._manifests: dict[ObjectInfo, Manifest] = {}
        self._deltas, self._proofs = _Once(self._open), _Once(self._rebuild)

    @property
    def run(self) -> str:
        """The run's name; raises `ProtocolError` before there is one."""
        if (name := self._run()) is None:
            raise ProtocolError(f"{self.bucket.url} holds no run yet")
        return name

    def objects(self) -> Listing:
        """All objects of the run, at most `LIST_EVERY_S` seconds old."""
        with self._lock:
            at, run, listing = self._listed
            if run != self.run or self._clock() - at > LIST_EVERY_S:
                run, listing = self.run, self.bucket.list(Keys(self.run).folder)
                self._listed = self._clock(), run, listing
            return listing

    def delta(self, version: int) -> tuple[Manifest, Anatomy]:
        """The manifest of a version and its delta, opened."""
        return self._deltas(self._manifest(version))

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
        self.bucket.fetch(key, path)
        return path

    def _manifest(self, version: int) -> Manifest:
        manifests = manifests_of(self.objects())
        info, oldest = manifests.get(version), min(manifests, default=0)
        if info is None and 0 <= version < oldest:
            raise deleted(f"run {self.run!r} in {self.bucket.url}", version, oldest)
        if info is None:
            raise ProtocolError(f"run {self.run!r} has no version {version} in {self.bucket.url}")
        with self._lock:
            if info not in self._manifests:
                self._manifests[info] = RunReader(self.bucket, self.run).unpinned(info.key)
                if len(self._manifests) > 4 * KEPT:
                    del self._manifests[next(iter(self._manifests))]
            return self._manifests[info]

    def _open(self, manifest: Manifest) -> tuple[Manifest, Anatomy]:
        if not manifest.deltas:
            raise ProtocolError(f"v{manifest.version} is an anchor: every weight is new, there is no delta")
        with tempfile.TemporaryDirectory() as folder:
            path = RunReader(self.bucket, self.run).fetch(manifest.deltas[-1], Path(folder))
            return manifest, open_delta(path)

    def _rebuild(self, manifest: Manifest) -> str:
        if manifest.full_bytes > MAX_REBUILD:
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
