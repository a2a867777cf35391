"""Which version of a run is the newest, also where a HEAD is torn, deleted, old or somebody else's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from delta_weight_sync.keys import Keys, ManifestKey, Writer, head_writer, manifest_key
from delta_weight_sync.protocol import FileRef, Head, Manifest, ProtocolError, Sealed, parse, reference
from delta_weight_sync.store import Bucket, BucketUnreachable, Listing, ObjectInfo, ObjectMissing

_TRIES = 5  # of reading a HEAD that a new writer removes meanwhile
Kind = TypeVar("Kind", bound=Sealed)


class NoVersionError(ProtocolError):
    """The run has published nothing yet."""


class RecordReader:
    """Reads a run's records, each checked: whole, of this run, and pinned by the one that names it."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self.bucket = bucket
        self.keys = Keys(run)

    def writers(self) -> list[Writer]:
        """Everybody whose HEAD is there; the last one owns the run."""
        found = (head_writer(info.key) for info in self.bucket.list(self.keys.heads))
        return sorted(writer for writer in found if writer)

    def head(self, below: Writer | None = None) -> Head | None:
        """The owner's HEAD, or that of the last writer before `below`; None for a run that nobody began.

        One that is damaged or gone is rebuilt from the manifests.
        """
        for _ in range(_TRIES):
            writers = [writer for writer in self.writers() if below is None or writer < below]
            with contextlib.suppress(ObjectMissing):
                return self._last_good(writers)
        raise BucketUnreachable(f"{self.bucket.url}/{self.keys.heads} lists what is not there: try again")

    def _last_good(self, writers: list[Writer]) -> Head | None:
        for writer in reversed(writers):
            try:
                return self.head_of(writer)
            except ProtocolError:
                if rebuilt := self.rebuilt(writer):
                    return rebuilt
        return self.rebuilt()

    def head_of(self, writer: Writer) -> Head:
        """A writer's HEAD; raises `ProtocolError` if it is damaged, `ObjectMissing` if it is gone."""
        key = self.keys.head(writer)
        head = self.read(Head, key)
        if (head.writer_term, head.writer) != writer:
            raise ProtocolError(f"{key} is the HEAD of another writer: it was not followed")
        return head

    def rebuilt(self, writer: Writer | None = None) -> Head | None:
        """What HEAD should say: the newest version that is whole, of `writer` if one is given."""
        there = {info.key: info.size for info in self.bucket.list(self.keys.folder)}
        for _, key in sorted(_manifests(there, writer), reverse=True):
            with contextlib.suppress(ProtocolError, ObjectMissing):
                manifest = self.unpinned(key)
                if all(there.get(file.key) == file.size for file in manifest.way().files):
                    return _head_of(manifest, key)
        return None

    def newest(self) -> Manifest | None:
        """The newest version's manifest, or None before the first one is published."""
        head = self.head()
        return self.named(head) if head else None

    def named(self, head: Head) -> Manifest | None:
        """The manifest that `head` names; where that is damaged or gone, the newest whole version's."""
        if head.manifest is None:
            return None
        try:
            return self.manifest(head.manifest)
        except (ProtocolError, ObjectMissing):
            rebuilt = self.rebuilt()
            if rebuilt is None or rebuilt.manifest is None:
                raise
            return self.manifest(rebuilt.manifest)

    def manifest(self, ref: FileRef) -> Manifest:
        """The manifest that `ref` pins."""
        return self.read(Manifest, ref.key, ref)

    def unpinned(self, key: str) -> Manifest:
        """The manifest at a key that nothing names by hash: it must be the one that the key says."""
        manifest = self.read(Manifest, key)
        if key != self.keys.manifest(manifest.version, Writer(manifest.writer_term, manifest.writer)):
            raise ProtocolError(f"{key} holds the manifest of another version: it was not used")
        return manifest

    def require_sound(self) -> None:
        """Raise `ProtocolError` or `ObjectMissing` where the newest version was only found around damage."""
        if writers := self.writers():
            head = self.head_of(writers[-1])
            if head.manifest:
                self.manifest(head.manifest)

    def read(self, kind: type[Kind], key: str, ref: FileRef | None = None) -> Kind:
        """A record of this run, pinned by `ref` if one is given."""
        data = self.bucket.get(key)
        if ref:
            ref.check(data)
        record = parse(kind, data, key)
        if record.run != self.keys.run:
            raise ProtocolError(f"{key} belongs to run {record.run!r}: it was not used")
        return record


def manifests_of(objects: Listing) -> dict[int, ObjectInfo]:
    """The manifest of each version; of several writers' the last one's, which HEAD came to name."""
    known = {info.key: info for info in objects}
    return {found.version: known[key] for found, key in sorted(_manifests(known))}


def _manifests(keys: Iterable[str], writer: Writer | None = None) -> Iterator[tuple[ManifestKey, str]]:
    for key in keys:
        if (found := manifest_key(key)) and found.of(writer):
            yield found, key


def _head_of(manifest: Manifest, key: str) -> Head:
    return Head(
        run=manifest.run,
        born=manifest.born,
        version=manifest.version,
        manifest=reference(key, manifest),
        writer_term=manifest.writer_term,
        writer=manifest.writer,
    )
