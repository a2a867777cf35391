"""Whether what the newest version is built from is still in the bucket as it was published."""

from __future__ import annotations

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.store import ObjectInfo

_EVERY = 16  # versions; each time the run is listed


class Inspection:
    """Of a living run, by its writer; one listing now and then, nothing is read."""

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
        damaged = any(self._differs(seen[file.key], file.size) for file in files)
        if not damaged:
            self._seen, self._at = seen, newest.version
        return damaged

    def _differs(self, now: ObjectInfo | None, size: int) -> bool:
        if now is None or now.size != size:
            return True
        return (self._seen.get(now.key) or now).etag != now.etag
