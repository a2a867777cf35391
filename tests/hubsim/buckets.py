"""What a bucket is: paths, each with the Xet hash of its content, and a log of their changes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .clock import iso, now


@dataclass(frozen=True)
class Entry:
    """One file of a bucket."""

    size: int
    xet_hash: str
    mtime: str
    uploaded_at: str = field(default_factory=now)

    def to_json(self, path: str) -> dict[str, Any]:
        times = {"mtime": self.mtime, "uploadedAt": self.uploaded_at}
        return {"type": "file", "path": path, "size": self.size, "xetHash": self.xet_hash, **times}


@dataclass
class BucketState:
    """One bucket: path -> file."""

    id: str
    private: bool
    created_at: str = field(default_factory=now)
    files: dict[str, Entry] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # as the feed of changes tells them
    endings: int = 0  # how often all connections to the feed were ended, the last time with a word or without
    politely: bool = True
    _bells: set[asyncio.Event] = field(default_factory=set)

    def put(self, path: str, size: int, xet_hash: str, mtime: int) -> None:
        """Add or replace a file; `mtime` in milliseconds since 1970."""
        entry = Entry(size, xet_hash, iso(datetime.fromtimestamp(mtime / 1000, UTC)))
        self.changes.append({**entry.to_json(path), "op": "update" if path in self.files else "add"})
        self.files[path] = entry
        self._ring()

    def delete(self, path: str) -> None:
        """Delete a file; one that is not there does not matter."""
        if self.files.pop(path, None):
            self.changes.append({"path": path, "op": "delete", "uploadedAt": now()})
            self._ring()

    def end_feeds(self, *, politely: bool) -> None:
        """End all connections to the feed of changes."""
        self.endings, self.politely = self.endings + 1, politely
        self._ring()

    @contextmanager
    def listener(self) -> Iterator[asyncio.Event]:
        """Set at each change, within the block."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.remove(bell)

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()

    def to_json(self) -> dict[str, object]:
        size = sum(file.size for file in self.files.values())
        times = {"createdAt": self.created_at, "updatedAt": self.created_at}
        return {"id": self.id, "private": self.private, "size": size, "totalFiles": len(self.files), **times}

    def tree(self, prefix: str, *, recursive: bool) -> list[dict[str, Any]]:
        """All files whose path begins with these letters, or the files and folders one level below them."""
        paths = sorted(path for path in self.files if path.startswith(prefix))
        if recursive:
            return [self.files[path].to_json(path) for path in paths]
        depth = prefix.rstrip("/").count("/") + 2 if prefix else 1
        entries: dict[str, dict[str, Any]] = {}
        for path in paths:
            shown = "/".join(path.split("/")[:depth])
            entries[shown] = self.files[path].to_json(path) if shown == path else self._folder(shown)
        return list(entries.values())

    def _folder(self, path: str) -> dict[str, Any]:
        times = [file.uploaded_at for name, file in self.files.items() if name.startswith(f"{path}/")]
        return {"type": "directory", "path": path, "uploadedAt": max(times)}
