"""Buckets: paths, each with the Xet hash of its content, and the feed of their changes."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from .common import HubError, iso, now


@dataclass(frozen=True)
class Entry:
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
    changes: list[dict[str, Any]] = field(default_factory=list)  # as the feed sends them
    endings: int = 0  # how often all connections to the feed were ended; `politely` is about the last time
    politely: bool = True
    _bells: set[asyncio.Event] = field(default_factory=set)

    def put(self, path: str, size: int, xet_hash: str, mtime: int) -> None:
        entry = Entry(size, xet_hash, iso(datetime.fromtimestamp(mtime / 1000, UTC)))
        self.changes.append({**entry.to_json(path), "op": "update" if path in self.files else "add"})
        self.files[path] = entry
        self._ring()

    def delete(self, path: str) -> None:
        if self.files.pop(path, None):
            self.changes.append({"path": path, "op": "delete", "uploadedAt": now()})
            self._ring()

    def end_feeds(self, *, politely: bool) -> None:
        self.endings += 1
        self.politely = politely
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


class Feed(BaseModel, extra="forbid"):
    """How the feeds of all buckets are served; a test may change it."""

    ping_s: float = 0.05  # only then a client checks whether it should stop; about 30 on the real Hub
    silent: bool = False  # connections stay open, and nothing more is sent
    forgets: bool = False  # no earlier cursor can be resumed


def place(bucket: BucketState, cursor: str | None, rules: Feed) -> int | None:
    """The number of changes that a client with this cursor has received; None if it must start over."""
    if cursor is None:
        return len(bucket.changes)
    if not cursor.isdigit() or int(cursor) > len(bucket.changes):
        raise HubError(400, "Invalid cursor")
    return None if rules.forgets else int(cursor)


async def feed(bucket: BucketState, sent: int | None, since: str, rules: Feed) -> AsyncIterator[str]:
    """Server-sent events: the changes after the first `sent` and the time `since`, then new ones."""
    if sent is None:
        yield _event("reset", reason="cursor_too_old")
        return
    missed = [change for change in bucket.changes[0 if since else sent :] if change["uploadedAt"] >= since]
    sent = len(bucket.changes)
    if missed:
        yield _event("changes", cursor=str(sent), changes=missed)
    yield _event("ready", cursor=str(sent))
    async for event in _news(bucket, sent, rules):
        yield event


async def _news(bucket: BucketState, sent: int, rules: Feed) -> AsyncIterator[str]:
    with bucket.listener() as bell:
        endings = bucket.endings
        while bucket.endings == endings:
            if (fresh := bucket.changes[sent:]) and not rules.silent:
                sent += len(fresh)
                yield _event("changes", cursor=str(sent), changes=fresh)
            try:
                await asyncio.wait_for(bell.wait(), rules.ping_s)
                bell.clear()
            except TimeoutError:
                if not rules.silent:
                    yield ": ping\n\n"
    if bucket.politely:
        yield _event("reconnect", cursor=str(sent))


def _event(name: str, **payload: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n"
