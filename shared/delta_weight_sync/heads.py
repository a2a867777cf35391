"""Which version of a run is the newest, also where a HEAD is torn, deleted, old or somebody else's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from delta_weight_sync.keys import Keys, ManifestKey, Writer, head_writer, manifest_key
from delta_weight_sync.protocol import Head, Manifest, Rank, Sealed, parse, reference
from delta_weight_sync.refs import FileRef, ProtocolError
from delta_weight_sync.signing import PublicKeys, SignatureError, believed_here
from delta_weight_sync.store import Bucket, BucketUnreachable, Listing, ObjectInfo, ObjectMissing

_TRIES = 5  # of reading a HEAD that a new writer removes meanwhile
_UNSIGNED = 16  # manifests that are passed over: all may be unsigned, where a reader has the wrong key
_DAMAGED = 64  # and that are damaged, or want files that are gone: whoever can write can put any number there
Kind = TypeVar("Kind", bound=Sealed)
Refused = dict[str, Exception]
"""What was passed over on the way to a sound record, key by key, and why."""


class NoVersionError(ProtocolError):
    """The run has published nothing yet."""


class RecordReader:
    """Reads a run's records, each checked: whole, signed, of this run, pinned by the one that names it."""

    def __init__(self, bucket: Bucket, run: str, believed: PublicKeys | None = None) -> None:
        """`believed`: the keys of which one must have signed; by default those of the environment."""
        self.bucket = bucket
        self.keys = Keys(run)
        self.believed = believed_here() if believed is None else believed

    def writers(self) -> list[Writer]:
        """Everybody whose HEAD is there; the last one owns the run."""
        found = (head_writer(info.key) for info in self.bucket.list(self.keys.heads))
        return sorted(writer for writer in found if writer)

    def successor(self, of: Writer, born: float | None, refused: Refused) -> Writer | None:
        """The last writer after `of`, which took the run over; `born` is that of the version that `of` wrote.

        Where keys are believed, a HEAD that none of them signed, or of a run that was there before this one,
        is nobody's claim: who can write to the bucket stops no trainer with it.
        """
        for writer in reversed(self.writers()):
            if writer <= of:
                return None
            if not self.believed or self._claims(writer, born, refused):
                return writer
        return None

    def _claims(self, writer: Writer, born: float | None, refused: Refused) -> bool:
        try:
            head = self.head_of(writer)
        except ObjectMissing:  # a still later one has removed it
            return True
        except ProtocolError as error:
            refused[self.keys.head(writer)] = error
            return False
        return head.version is None or born is None or head.born >= born

    def head(
        self, below: Writer | None = None, floor: Rank | None = None, refused: Refused | None = None
    ) -> Head | None:
        """The owner's HEAD, or that of the last writer before `below`; None for a run that nobody began.

        One that is damaged, gone, not signed or below `floor` is rebuilt from the manifests, and `refused` is
        told. Raises `ProtocolError` where all that is there is not signed, or below `floor`.
        """
        for _ in range(_TRIES):
            writers = [writer for writer in self.writers() if below is None or writer < below]
            told: Refused = {}
            with contextlib.suppress(ObjectMissing):
                head = self._last_good(writers, floor, told)
                why = [error for error in told.values() if floor or isinstance(error, SignatureError)]
                if head is None and why:
                    raise type(why[0])("; ".join(map(str, why)))
                if refused is not None:
                    refused.update(told)
                return head
        raise BucketUnreachable(f"{self.bucket.url}/{self.keys.heads} lists what is not there: try again")

    def _last_good(self, writers: list[Writer], floor: Rank | None, refused: Refused) -> Head | None:
        for writer in reversed(writers):
            try:
                return self.head_of(writer, floor)
            except ProtocolError as error:
                refused[self.keys.head(writer)] = error
                rebuilt = self.rebuilt(writer)
                if rebuilt and (floor is None or rebuilt.rank >= floor):
                    return rebuilt
        rebuilt = self.rebuilt()
        if rebuilt and floor and rebuilt.rank < floor:
            what = f"HEAD of run {self.keys.run!r}"
            refused[self.keys.heads] = older(what, rebuilt.version, floor)
            return None
        return rebuilt

    def head_of(self, writer: Writer, floor: Rank | None = None) -> Head:
        """A writer's HEAD; raises `ProtocolError` if it is damaged or below `floor`, or `ObjectMissing`."""
        key = self.keys.head(writer)
        head = self.read(Head, key)
        if (head.writer_term, head.writer) != writer:
            raise ProtocolError(f"{key} is the HEAD of another writer: it was not followed")
        if floor and head.rank < floor:
            raise older(key, head.version, floor)
        return head

    def rebuilt(self, writer: Writer | None = None) -> Head | None:
        """What HEAD should say: the newest version that is whole, of `writer` if one is given."""
        there = {info.key: info.size for info in self.bucket.list(self.keys.folder)}
        unsigned = 0
        for _, key in sorted(_manifests(there, writer), reverse=True)[:_DAMAGED]:
            try:
                manifest = self.unpinned(key)
                if all(there.get(file.key) == file.size for file in manifest.way().files):
                    return _head_of(manifest, key)
            except SignatureError:
                unsigned += 1
                if unsigned == _UNSIGNED:
                    break
            except (ProtocolError, ObjectMissing):
                pass
        return None

    def newest(self) -> Manifest | None:
        """The newest version's manifest, or None before the first one is published."""
        head = self.head()
        return self.named(head) if head else None

    def named(self, head: Head, refused: Refused | None = None) -> Manifest | None:
        """The manifest that `head` names; where that is damaged or gone, the newest whole version's.

        `refused` is told of it.
        """
        if head.manifest is None:
            return None
        try:
            return self.manifest(head.manifest)
        except (ProtocolError, ObjectMissing) as error:
            if refused is not None:
                refused[head.manifest.key] = error
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

    def published(self, version: int, born: float) -> Manifest | None:
        """The last writer's manifest of a version, of those that are signed and of the run born at `born`."""
        listed = (info.key for info in self.bucket.list(self.keys.manifests))
        refused: Refused = {}
        for found, key in sorted(_manifests(listed), reverse=True):
            if found.version != version:
                continue
            try:
                manifest = self.unpinned(key)
            except SignatureError as error:
                refused[key] = error
                continue
            if manifest.born == born:
                return manifest
        for why in refused.values():
            raise why
        return None

    def require_sound(self) -> None:
        """Raise `ProtocolError` or `ObjectMissing` where the newest version was only found around damage."""
        if writers := self.writers():
            head = self.head_of(writers[-1])
            if head.manifest:
                self.manifest(head.manifest)

    def read(self, kind: type[Kind], key: str, ref: FileRef | None = None) -> Kind:
        """A record of this run, pinned by `ref` if one is given; every record that is acted on is read here.

        Raises `SignatureError` where none of the keys that are believed signed it.
        """
        data = self.bucket.get(key)
        if ref:
            ref.check(data)
        record = parse(kind, data, key)
        if record.run != self.keys.run:
            raise ProtocolError(f"{key} belongs to run {record.run!r}: it was not used")
        self.believed.signer(record, key)
        return record

    def signer(self, manifest: Manifest) -> str | None:
        """The fingerprint of the key that signed it; None where signatures are not looked at."""
        return self.believed.signer(manifest, f"the manifest of version {manifest.version}")


def older(what: str, version: int | None, floor: Rank) -> ProtocolError:
    """The error for what would lead back from a version that was seen."""
    return ProtocolError(
        f"{what} went back from version {floor[-1]} to {version}: it was not followed; if the run was started"
        " over, heal this replica, or follow into an empty folder"
    )


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
