"""Whether what the newest version is built from is still in the bucket as it was published."""

from __future__ import annotations

import tempfile
from pathlib import Path

from delta_weight_sync.checkpoint import WEIGHTS
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import DeltaRef, FileRef, ProtocolError
from delta_weight_sync.store import ObjectInfo, ObjectMissing

_EVERY = 16  # versions; each time the run is listed


class Inspection:
    """Of a living run, by its writer; one listing now and then.

    Only the files beside the weights are read, once: the others its writer has written, or read, itself.
    """

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._seen: dict[str, ObjectInfo | None] = {}  # files of the newest version, as they were listed
        self._at = 0  # the version that was sound last

    def finds_damage(self, newest: Manifest) -> bool:
        """Whether a file of the newest version is gone, or not what it was; True until none is any more."""
        if newest.version < self._at + _EVERY:
            return False
        there = {info.key: info for info in self._reader.bucket.list(self._reader.keys.folder)}
        files = newest.way().files
        seen = {file.key: there.get(file.key) for file in files}
        damaged = any(self._is_damaged(file, seen[file.key]) for file in files)
        if not damaged:
            self._seen, self._at = seen, newest.version
        return damaged

    def _is_damaged(self, file: FileRef, now: ObjectInfo | None) -> bool:
        if now is None or now.size != file.size:
            return True
        before = self._seen.get(file.key)
        return now.etag != before.etag if before else not self._reads_well(file)

    def _reads_well(self, file: FileRef) -> bool:
        if isinstance(file, DeltaRef) or file.name == WEIGHTS:
            return True
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._reader.fetch(file, Path(folder))
        except (ProtocolError, ObjectMissing):
            return False
        return True
